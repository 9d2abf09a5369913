"""A part of the module that is trained later than the rest, and at a lower rate (L10)."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, PathError
from fulgurite_optimizers import BackboneFinetuning, Freeze, GradientAccumulation
from fulgurite_optimizers.finetuning import scale_rate_of_part
from fulgurite_testing import assert_same_bits
from games import Compiled, engine

PARAMS = {"backbone": jnp.zeros(()), "head": jnp.zeros(())}
GRADS = {"backbone": jnp.ones(()), "head": jnp.ones(())}


class Sum(fg.Module):
    """Both numbers have the gradient 1."""

    backbone: jax.Array
    head: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.backbone + self.head)

    def configure_optimizers(self) -> Any:
        return optax.sgd(lambda count: 2.0 ** (count + 1))


START = Sum(jnp.zeros(()), jnp.zeros(()))
BATCHES = [np.zeros(1, np.float32)]


def list_updates(optimizer: Any, is_there: str) -> list[float]:
    """Return the updates of the backbone, and check those of the head.

    Args:
        optimizer: the optimizer for the head.
        is_there: for each step `x`, or `.` where the backbone is frozen.
    """
    scaled = scale_rate_of_part(
        optimizer, frozenset({"backbone"}), BackboneFinetuning("a", 0, rate=0.5).compute_rate
    )
    state: Any = scaled.init(PARAMS)
    head_state = optimizer.init({"head": PARAMS["head"]})
    updates: Any
    head_updates: Any
    values = []
    for flag in is_there:
        grads = GRADS if flag == "x" else {**GRADS, "backbone": None}
        params = PARAMS if flag == "x" else {**PARAMS, "backbone": None}
        updates, state = scaled.update(grads, state, params)
        head_updates, head_state = optimizer.update(
            {"head": GRADS["head"]}, head_state, {"head": PARAMS["head"]}
        )
        assert_same_bits(updates["head"], head_updates["head"])
        if flag == "x":
            values.append(float(updates["backbone"]))
    assert int(state.num_updates) == len(values)
    return values


def test_the_part_has_moments_of_its_own_and_the_schedule_of_the_rest() -> None:
    """Adam begins with the whole rate, as its gradients are always 1; the schedule is at its third
    and fourth value, 8 and 16, when the part begins."""

    def schedule(count: Any) -> Any:
        return 2.0 ** (count + 1)

    assert list_updates(optax.sgd(schedule), "..xx") == [-4, -8]
    np.testing.assert_allclose(list_updates(optax.adam(0.1), "....xxx"), [-0.05] * 3, rtol=1e-4)
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    np.testing.assert_allclose(list_updates(injected, "..xx"), [-4, -8], rtol=1e-5)


def test_the_fraction_grows() -> None:
    warm = BackboneFinetuning("a", 0, rate=0.2, warmup=4)
    rates = [float(warm.compute_rate(jnp.int32(count))) for count in range(6)]
    np.testing.assert_allclose(rates, [0.05, 0.1, 0.15, 0.2, 0.2, 0.2], rtol=1e-6)
    doubling = BackboneFinetuning("a", 0, rate=optax.exponential_decay(0.1, 2, 2.0, staircase=True))
    rates = [float(doubling.compute_rate(jnp.int32(count))) for count in range(4)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.2, 0.2], rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_backbone_is_trained_from_a_step_on_at_its_rate(steps_per_execution: int) -> None:
    """The rates of the head are 2, 4, 8, 16, of the backbone a half of 8 and of 16."""
    compiled = Compiled()
    tuning = BackboneFinetuning("backbone", 2, rate=0.5)
    result = engine(
        tuning, compiled, steps=4, log_every=1, steps_per_execution=steps_per_execution
    ).fit(START, BATCHES)
    assert (float(result.module.head), float(result.module.backbone)) == (-30, -12)
    assert result.history["train/backbone_finetuning/rate"].tolist() == [0, 0, 0.5, 0.5]
    (message,) = result.messages
    assert "is trained from step 2 on: the step is compiled again" in message
    assert len(compiled.executables) == 2


@pytest.mark.full
def test_updates_of_accumulated_gradients_count() -> None:
    """The head is updated after steps 2 and 4, by 2 and 4; the backbone after step 4, by 4 / 4."""
    tuning = BackboneFinetuning("backbone", 2, rate=0.5, warmup=2)
    plugins = [tuning, GradientAccumulation(2, "steps")]
    result = engine(*plugins, steps=4).fit(START, BATCHES)
    assert (float(result.module.head), float(result.module.backbone)) == (-6, -1)


@pytest.mark.parametrize("plugin", [BackboneFinetuning("backbone", 9), Freeze("backbone", 9)])
def test_a_part_that_is_never_trained_is_told(plugin: Any) -> None:
    (message,) = engine(plugin, steps=4).fit(START, BATCHES).messages
    assert message.endswith(
        "is to be trained from step 9 on, and the fit ends at step 4, before that"
    )


def test_invalid_finetuning_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="rate is 0.0; give a positive fraction"):
        BackboneFinetuning("backbone", 3, rate=0.0)
    with pytest.raises(ConfigurationError, match="warmup is -1"):
        BackboneFinetuning("backbone", 3, warmup=-1)
    with pytest.raises(ConfigurationError, match="until is EverySeconds"):
        BackboneFinetuning("backbone", fg.EverySeconds(3))
    with pytest.raises(PathError, match="'trunk' selects no array"):
        BackboneFinetuning("trunk", 3).configure_optimizers(START)
    partial = type("Partial", (Sum,), {"configure_optimizers": optimize_head})
    with pytest.raises(ConfigurationError, match="no optimizer updates what select"):
        BackboneFinetuning("backbone", 3).configure_optimizers(partial(START.backbone, START.head))


def optimize_head(self: Any) -> Any:
    return {"default": fg.OptimizerSpec(optax.sgd(0.1), "head")}
