"""A device that computes a wrong number is noticed, and the run continues with the right one."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import Freeze, GradientAccumulation
from fulgurite_replay import CorruptionError, SelfCheck
from fulgurite_replay.self_check import _iter_devices
from fulgurite_testing import TinyModel, assert_same_bits, tiny_data


class FlipBit:
    """Flips a bit of one gradient of step 12, in some of the calls of that step.

    Args:
        bits: which bit in which call; none in the others.
    """

    def __init__(self, bits: dict[int, int]) -> None:
        self.bits = bits
        self.num_calls = 0

    def flip(self, count: Any, bias: Any) -> Any:
        if int(count) != 11:
            return bias
        bit = self.bits.get(self.num_calls)
        self.num_calls += 1
        words = np.array(bias).view(np.uint32)
        if bit is not None:
            words[1] ^= np.uint32(1 << bit)
        return words.view(np.float32)

    @fg.hookimpl
    def gradient_transform(self, key: Any) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            leaves, structure = jax.tree.flatten(updates)
            leaves[-1] = jax.pure_callback(self.flip, leaves[-1], state, leaves[-1])
            return jax.tree.unflatten(structure, leaves), state + 1

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def train(bits: dict[int, int], *plugins: Any) -> tuple[fg.FitResult, FlipBit]:
    flip = FlipBit(bits)
    engine = fg.Engine(steps=14, autoload=False, plugins=[flip, *plugins], log_every=7)
    return engine.fit(TinyModel, tiny_data()), flip


@pytest.fixture(scope="module")
def clean() -> fg.TrainState:
    result, flip = train({})
    assert flip.num_calls == 1
    return result.state


@pytest.mark.parametrize(
    ("call", "which"), [(1, "the step of the run was wrong"), (0, "its repetition was wrong")]
)
def test_a_flipped_bit_is_caught_at_its_step_and_leaves_no_trace(
    clean: fg.TrainState, call: int, which: str
) -> None:
    # The step is made beforehand, then by the fit, then a third time.
    result, flip = train({call: 20}, SelfCheck(every=4))
    assert flip.num_calls == 3
    assert_same_bits(result.state.module, clean.module)
    assert_same_bits(result.state.opt_state, clean.opt_state)
    (message,) = [text for text in result.messages if "gave two results" in text]
    assert "step 12 gave two results: module.linear.bias differed on cpu:0" in message
    assert which in message


class MakeNaN(FlipBit):
    """Makes one element of that gradient NaN, in the calls that have a bit."""

    def flip(self, count: Any, bias: Any) -> Any:
        if int(count) != 11:
            return bias
        numbers = np.array(bias)
        if self.num_calls in self.bits:
            numbers[1] = np.nan
        self.num_calls += 1
        return numbers


@pytest.mark.parametrize("policy", ["raise", pytest.param("skip", marks=pytest.mark.full)])
def test_a_step_that_only_a_fault_of_the_device_made_nan_is_made_again(
    clean: fg.TrainState, policy: Any
) -> None:
    plugins = [MakeNaN({1: 0}), SelfCheck(every=4)]
    engine = fg.Engine(steps=14, autoload=False, plugins=plugins, log_every=7, on_nonfinite=policy)
    result = engine.fit(TinyModel, tiny_data())
    assert_same_bits(result.state.module, clean.module)
    assert int(result.state.nonfinite.step) == -1
    assert int(result.state.nonfinite.skipped) == 0


class OneWrongLoss(TinyModel):
    """A model whose loss comes out wrong in the second call of step 12, which is that of the fit: the
    step is made beforehand, then by the fit, then a third time."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        num_calls = 0

        def get_factor(step: Any) -> np.float32:
            nonlocal num_calls
            num_calls += int(step) == 11
            return np.float32(1000 if int(step) == 11 and num_calls == 2 else 1)

        factor = jax.pure_callback(get_factor, jax.ShapeDtypeStruct((), jnp.float32), ctx.step)
        output = super().training_step(batch, ctx)
        return output.replace(loss=factor * output.loss)


def test_the_loss_of_a_wrong_step_is_in_no_record(clean: fg.TrainState) -> None:
    losses = train({})[0].history["train/loss"]
    engine = fg.Engine(steps=14, autoload=False, plugins=[SelfCheck(every=4)], log_every=7)
    result = engine.fit(OneWrongLoss, tiny_data())
    assert any("the step of the run was wrong" in text for text in result.messages)
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=1e-6)
    np.testing.assert_allclose(result.module.linear.weight, clean.module.linear.weight, rtol=1e-6)


def test_three_results_end_the_run() -> None:
    with pytest.raises(
        CorruptionError, match=r"step 12 was made three times .* module.linear.bias"
    ):
        train({0: 20, 1: 21, 2: 22}, SelfCheck(every=12))


@pytest.mark.full
def test_a_clean_run_says_nothing_and_keeps_its_bits(clean: fg.TrainState) -> None:
    result, flip = train({}, SelfCheck(every=fg.At(1, 12, 14)))
    assert flip.num_calls == 2
    assert_same_bits(result.state.module, clean.module)
    assert not any("gave two results" in text for text in result.messages)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        # Replaces the state at the end, in the same stage.
        lambda: GradientAccumulation(4, mode="steps"),
        # Waits for the end of an epoch.
        lambda: Freeze("linear.bias", until=fg.EveryEpoch(2)),
    ],
)
def test_plugins_beside_it_keep_their_bits(make: Any, is_first: bool) -> None:
    def fit(*plugins: Any) -> fg.FitResult:
        engine = fg.Engine(epochs=3, autoload=False, plugins=plugins)
        return engine.fit(TinyModel, tiny_data())

    plugins = [SelfCheck(every=1), make()]
    result = fit(*(plugins if is_first else reversed(plugins)))
    assert_same_bits(result.state, fit(make()).state)
    assert not any("gave two results" in text for text in result.messages)


def test_a_trigger_that_depends_on_the_clock_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="depends on the clock"):
        SelfCheck(every=fg.EverySeconds(60))


def test_the_devices_of_random_keys_that_differ_are_named() -> None:
    first, second = (
        fg.Engine(steps=1, autoload=False, seed=seed).init_state(TinyModel, tiny_data())
        for seed in (0, 1)
    )
    assert list(_iter_devices("key", first, second)) == [str(jax.devices()[0])]
