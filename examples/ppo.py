# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-cli",
#     "jax",
#     "jaxtyping",
#     "numpy",
#     "optax",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# ///
"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) on a pole on a cart.

uv run examples/ppo.py                                  # installs it; a minute on two cores
python examples/ppo.py steps=200 envs=32

A step plays all environments on the device and then makes several updates. The environments are in
the state of the model, so a checkpoint holds them and a resumed run continues in the same episodes.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment, run
from jaxtyping import Array, Bool, Float, Int, Key

EPISODE = 500
"""The steps after which an episode is cut off."""


class Env(NamedTuple):
    """A pole on a cart (Barto, Sutton and Anderson 1983), with the constants of Gymnasium.

    Attributes:
        body: position and velocity of the cart, angle and angular velocity of the pole.
        length: the steps of the episode so far.
    """

    body: Float[Array, "*envs 4"]
    length: Int[Array, "*envs"]


def reset_env(key: Key[Array, ""]) -> Env:
    return Env(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.zeros((), jnp.int32))


def step_env(env: Env, action: Int[Array, ""]) -> tuple[Env, Bool[Array, ""]]:
    """Push the cart for 20 ms; return the environment, and whether the episode ends."""
    _, velocity, angle, spin = env.body
    push = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    force = (push + 0.05 * spin**2 * sine) / 1.1
    angular = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    linear = force - 0.05 * angular * cosine / 1.1
    body = env.body + 0.02 * jnp.array([velocity, linear, spin, angular])
    env = Env(body, env.length + 1)
    has_fallen = (jnp.abs(body[0]) > 2.4) | (jnp.abs(body[2]) > 0.2095)
    return env, has_fallen | (env.length >= EPISODE)


class Rollout(NamedTuple):
    """What was played, `(time, envs)`.

    Attributes:
        body: what the agent saw.
        action: what it did.
        log_prob: of the action, then.
        value: its estimate of the return.
        has_ended: whether the episode ended with this step.
        length: of the episode that ended.
        advantage: by how much the return was better than the estimate.
    """

    body: Float[Array, "*steps 4"]
    action: Int[Array, "*steps"]
    log_prob: Float[Array, "*steps"]
    value: Float[Array, "*steps"]
    has_ended: Bool[Array, "*steps"]
    length: Int[Array, "*steps"]
    advantage: Float[Array, "*steps"]


class Agent(fg.Module):
    """A policy and an estimate of returns, with the environments that it plays in."""

    policy: eqx.nn.MLP
    value: eqx.nn.MLP
    envs: eqx.nn.StateIndex
    lr: float = eqx.field(static=True)

    def __init__(self, num_envs: int, lr: float, *, key: Key[Array, ""]) -> None:
        policy_key, value_key, env_key = jax.random.split(key, 3)
        self.policy = eqx.nn.MLP(4, 2, 64, 2, jnp.tanh, key=policy_key)
        self.value = eqx.nn.MLP(4, "scalar", 64, 2, jnp.tanh, key=value_key)
        self.envs = eqx.nn.StateIndex(jax.vmap(reset_env)(jax.random.split(env_key, num_envs)))
        self.lr = lr

    def play(
        self, model_state: eqx.nn.State, key: Key[Array, ""], length: int
    ) -> tuple[Rollout, eqx.nn.State]:
        """Play `length` steps in each environment; one that ends begins again."""

        def play_step(env: Env, key: Key[Array, ""]) -> tuple[Env, Rollout]:
            act_key, reset_key = jax.random.split(key)
            logits = self.policy(env.body)
            action = jax.random.categorical(act_key, logits)
            played, has_ended = step_env(env, action)
            log_prob = jax.nn.log_softmax(logits)[action]
            value = self.value(env.body)
            rest = (log_prob, value, has_ended, played.length, jnp.zeros(()))
            following = jax.tree.map(partial(jnp.where, has_ended), reset_env(reset_key), played)
            return following, Rollout(env.body, action, *rest)

        def play_all(envs: Env, key: Key[Array, ""]) -> tuple[Env, Rollout]:
            return jax.vmap(play_step)(envs, jax.random.split(key, len(envs.length)))

        envs, rollout = jax.lax.scan(
            play_all, model_state.get(self.envs), jax.random.split(key, length)
        )
        last_value = jax.vmap(self.value)(envs.body)
        advantage = estimate_advantages(rollout.value, rollout.has_ended, last_value)
        return rollout._replace(advantage=advantage), model_state.set(self.envs, envs)

    def training_step(self, batch: Rollout, ctx: fg.Context) -> fg.Output:
        """Return the clipped loss of a minibatch of a rollout."""
        logits = jax.nn.log_softmax(jax.vmap(self.policy)(batch.body))
        log_prob = jnp.take_along_axis(logits, batch.action[:, None], axis=1)[:, 0]
        ratio = jnp.exp(log_prob - batch.log_prob)
        scaled = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
        error = jax.vmap(self.value)(batch.body) - (batch.value + batch.advantage)
        entropy = -jnp.sum(jnp.exp(logits) * logits, axis=1)
        return fg.Output(
            fg.metrics.Mean.from_values(policy + 0.5 * error**2 - 0.01 * entropy),
            metrics={"entropy": fg.metrics.Mean.from_values(entropy)},
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.lr, eps=1e-5))


def estimate_advantages(
    value: Float[Array, "time envs"],
    has_ended: Bool[Array, "time envs"],
    last_value: Float[Array, " envs"],
    discount: float = 0.99,
    decay: float = 0.95,
) -> Float[Array, "time envs"]:
    """Return generalized advantages (Schulman et al. 2016, arXiv:1506.02438); each reward is 1."""

    def go_back(following: Any, step: Any) -> Any:
        advantage, next_value = following
        value, has_ended = step
        error = 1 + discount * next_value * ~has_ended - value
        advantage = error + discount * decay * advantage * ~has_ended
        return (advantage, value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(go_back, start, (value, has_ended), reverse=True)[1]


class PPO(fg.Engine):
    """Plays a rollout in each step, and makes several updates with it.

    Args:
        length: the steps of each environment in a rollout.
        epochs: how often each of them is used.
        num_minibatches: the updates of an epoch.
        settings: those of every engine.
    """

    def __init__(
        self, *, length: int = 128, epochs: int = 4, num_minibatches: int = 4, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.rollout_length = length
        self.num_epochs, self.num_minibatches = epochs, num_minibatches

    def train_step(
        self, state: fg.TrainState, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
    ) -> tuple[fg.TrainState, fg.Output]:
        arrays, static = eqx.partition(state.replace(model_state=None), eqx.is_array)
        play_key, order_key = ctx.keys("default", 2)
        rollout, model_state = state.module.play(state.model_state, play_key, self.rollout_length)
        steps = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rollout)
        orders = [
            jax.random.permutation(key, len(steps.action)).reshape(self.num_minibatches, -1)
            for key in jax.random.split(order_key, self.num_epochs)
        ]
        ctx = ctx.fork("updates", model_state=None)  # the losses need no environments

        def update(arrays: Any, rows: Int[Array, " minibatch"]) -> tuple[Any, fg.Output]:
            minibatch = jax.tree.map(lambda leaf: leaf[rows], steps)
            state, output = update_rule(self.forward, eqx.combine(arrays, static), minibatch, ctx)
            return eqx.filter(state, eqx.is_array), output

        arrays, outputs = jax.lax.scan(update, arrays, jnp.concatenate(orders))
        output = jax.tree.map(lambda leaf: leaf[-1], outputs)
        ended = fg.metrics.Mean.from_values(steps.length, steps.has_ended)
        output = output.replace(metrics={**output.metrics, "episode_length": ended})
        return eqx.combine(arrays, static).replace(model_state=model_state), output


class Report:
    """A plugin that prints a line at every log step."""

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if "episode_length" in record.values:
            length, entropy = record.values["episode_length"], record.values["entropy"]
            print(
                f"step {record.step:4}  episodes of {length:5.1f} steps  entropy {entropy:.3f}",
                flush=True,
            )


def experiment(
    steps: int = 100, envs: int = 16, length: int = 128, lr: float = 1e-3, seed: int = 0
) -> Experiment:
    """Learn to balance a pole; an episode is at most 500 steps long."""
    settings = {"steps": steps, "seed": seed, "log_every": 20, "plugins": [Report()]}
    return Experiment(
        engine=PPO(length=length, **settings),
        model=eqx.nn.make_with_state(partial(Agent, envs, lr)),
        data=[np.zeros(1, np.float32)],  # the agent makes its data itself
    )


if __name__ == "__main__":
    run(experiment)
