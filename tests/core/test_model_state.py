"""The model state in a step of one's own: which one a forward pass reads, and which one remains."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError

NO_DATA = [np.zeros(1, np.float32)]
STEPS = 4


class Follower(fg.Module):
    """Follows a position, which the step moves; its loss keeps a running mean of what it saw."""

    weight: jax.Array
    position: eqx.nn.StateIndex
    mean: eqx.nn.StateIndex

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jnp.zeros(())
        self.position = eqx.nn.StateIndex(jnp.zeros(()))
        self.mean = eqx.nn.StateIndex(jnp.zeros(()))

    def training_step(self, batch: Any, ctx: Any) -> fg.Output:
        mean = ctx.model_state.get(self.mean)
        model_state = ctx.model_state.set(self.mean, 0.5 * mean + 0.5 * batch.mean())
        return fg.Output(jnp.mean((self.weight - batch) ** 2), model_state=model_state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def follow_by_hand() -> tuple[float, float, float]:
    """Return weight, position and mean after the steps of `Moving`, in NumPy's numbers."""
    weight = position = mean = 0.0
    for _ in range(STEPS):
        position += 1
        for index in range(2):
            weight -= 0.1 * 2 * (weight - position - index)
            mean = 0.5 * mean + 0.5 * (position + index)
    return weight, position, mean


def move(state: Any, model_state: Any) -> Any:
    """Return the state with the position one further on, by `set` on a model state."""
    position = model_state.get(state.module.position) + 1
    return state.replace(model_state=model_state.set(state.module.position, position))


class Moving(fg.Engine):
    """Moves, and makes two updates."""

    def train_step(
        self, state: Any, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
    ) -> tuple[fg.TrainState, fg.Output]:
        state = move(state, state.model_state)
        position = state.model_state.get(state.module.position)
        output = fg.Output()
        for index in range(2):
            minibatch = jnp.full((4,), position + index)
            state, output = self.update(state, minibatch, ctx, update_rule, index)
        return state, output

    def update(
        self, state: fg.TrainState, batch: Any, ctx: Any, update_rule: Any, index: int
    ) -> tuple[fg.TrainState, fg.Output]:
        return update_rule(self.forward, state, batch, ctx)


class Forking(Moving):
    def update(self, state: Any, batch: Any, ctx: Any, update_rule: Any, index: int) -> Any:
        return update_rule(self.forward, state, batch, ctx.fork("update", index))


class ForkingWithState(Moving):
    def update(self, state: Any, batch: Any, ctx: Any, update_rule: Any, index: int) -> Any:
        ctx = ctx.fork("update", index, model_state=state.model_state)
        return update_rule(self.forward, state, batch, ctx)


class Applying(Moving):
    def update(self, state: Any, batch: Any, ctx: Any, update_rule: Any, index: int) -> Any:
        ctx = ctx.fork("update", index, model_state=state.model_state)
        grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
        return update_rule.apply_gradients(state, grads, output)


class Scanning(fg.Engine):
    """As `Moving`, in a scan over the minibatches."""

    last_output = staticmethod(lambda outputs: jax.tree.map(lambda leaf: leaf[-1], outputs))

    def train_step(
        self, state: Any, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
    ) -> tuple[fg.TrainState, fg.Output]:
        state = move(state, ctx.model_state)
        position = state.model_state.get(state.module.position)
        arrays, static = eqx.partition(state, eqx.is_array)

        def update(arrays: Any, index: jax.Array) -> Any:
            state = eqx.combine(arrays, static)
            minibatch = jnp.full((4,), position + index)
            state, output = update_rule(self.forward, state, minibatch, ctx.fork("update", index))
            return eqx.filter(state, eqx.is_array), output

        arrays, outputs = jax.lax.scan(update, arrays, jnp.arange(2))
        return eqx.combine(arrays, static), self.last_output(outputs)


@pytest.mark.variants("full")
@pytest.mark.parametrize("engine", [Moving, Forking, ForkingWithState, Applying, Scanning])
def test_each_update_of_a_step_reads_the_model_state_of_the_state_that_it_updates(
    engine: type[fg.Engine],
) -> None:
    result: Any = engine(steps=STEPS).fit(eqx.nn.make_with_state(Follower), NO_DATA)
    module, model_state = result.module, result.model_state
    observed = (module.weight, model_state.get(module.position), model_state.get(module.mean))
    np.testing.assert_allclose(observed, follow_by_hand(), rtol=1e-6)
    assert not result.messages


def test_plugins_see_the_model_state_that_the_train_state_holds() -> None:
    class MovingAfterwards(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            state, output = update_rule(self.forward, state, batch, ctx)
            return move(state, state.model_state), output

    class Watching:
        @fg.hookimpl
        def after_update(self, module: Any, plugin_state: Any, output: Any) -> Any:
            return module, output.model_state.get(module.position)

        @fg.hookimpl
        def init_plugin_state(self, module: Any) -> Any:
            return jnp.zeros(())

        @fg.hookimpl
        def step_metrics(self, state: Any) -> Any:
            return {"position": state.plugin_states["watching"]}

    engine = MovingAfterwards(steps=STEPS, log_every=1, plugins=[Watching()])
    result: Any = engine.fit(eqx.nn.make_with_state(Follower), NO_DATA)
    assert result.history["train/watching/position"].tolist() == [1, 2, 3, 4]
    assert float(result.model_state.get(result.module.position)) == STEPS


def test_outputs_of_several_updates_are_not_returned_stacked() -> None:
    class Stacking(Scanning):
        last_output = staticmethod(lambda outputs: outputs)

    with pytest.raises(
        ModelError, match=r"the loss term 'loss' of shape \(2,\).*the last, jax\.tree"
    ):
        Stacking(steps=1).fit(eqx.nn.make_with_state(Follower), NO_DATA)


def lose_before(engine: Any, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
    move(state, state.model_state)
    return update_rule(engine.forward, state, batch, ctx)


def lose_after(engine: Any, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
    state, output = update_rule(engine.forward, state, batch, ctx)
    move(state, state.model_state)
    return state, output


def give_two(engine: Any, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
    moved = move(state, ctx.model_state)
    return update_rule(engine.forward, state, batch, ctx.fork("a", model_state=moved.model_state))


def undo(engine: Any, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
    state = move(state, state.model_state)
    grads, output = fg.compute_gradients(engine.forward, state.module, batch, ctx)
    return update_rule.apply_gradients(state, grads, output)


@pytest.mark.parametrize(
    "train_step, message",
    [
        (lose_before, r"update_rule\(...\) received has a model state that `set` or a layer has u"),
        (lose_after, "train_step returned has a model state that `set` or a layer has used up"),
        (give_two, r"two model states, one in state and another in ctx: leave model_state out of "),
        (undo, r"before the step, which the forward pass read: call it with ctx.fork\(name, mod"),
    ],
)
def test_a_model_state_that_would_be_lost_is_an_error_that_says_where(
    train_step: Callable[..., Any], message: str
) -> None:
    engine = type("Losing", (fg.Engine,), {"train_step": train_step})
    with pytest.raises(ModelError, match=message):
        engine(steps=1).fit(eqx.nn.make_with_state(Follower), NO_DATA)
