"""How many steps go into one dispatch, and what does not depend on it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite._src.execution.dispatch import (
    LoopChoice,
    choose_loop,
    choose_steps_per_execution,
    count_batch_bytes,
)
from fulgurite._src.execution.flops import contains_primitive
from fulgurite.errors import ConfigurationError
from models import Act, Counting, numbers

IN_LOOP = LoopChoice(True, "small")


@pytest.mark.parametrize(
    ("interval", "epoch_length", "batch_bytes", "steps", "reason"),
    [
        (50.0, 50, 1000, 16, "small"),
        (float("inf"), float("inf"), 1000, 16, "small"),
        (10.5, 50, 1000, 10, "small"),
        (50.0, 3, 1000, 3, "small"),
        (1.9, 50, 1000, 1, "something is due after nearly every step"),
        (1.9, 1, 8, 1, "each step is the end of an epoch, because the data has one batch"),
        (50.0, 50, 4 * 2**20, 4, "small"),
        (50.0, 50, 9 * 2**20, 1, "a batch has 9.0 MiB"),
        (50.0, 50, 0, 16, "small"),
    ],
)
def test_number_of_steps(
    interval: float, epoch_length: float, batch_bytes: int, steps: int, reason: str
) -> None:
    choice = choose_steps_per_execution(IN_LOOP, batch_bytes, interval, epoch_length)
    assert choice == (steps, reason)


def test_steps_that_are_not_in_a_loop_are_single() -> None:
    choice = choose_steps_per_execution(LoopChoice(False, "large"), 8, 50.0, 50)
    assert choice == (1, "large")


@pytest.mark.full
def test_small_steps_run_in_a_loop_unless_there_is_a_convolution_or_a_mesh() -> None:
    def convolve(x: Any) -> Any:
        kernel = jnp.ones((1, 1, 3))
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")

    small = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((100, 100)))
    large = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((1000, 1000)))
    nested = jax.make_jaxpr(jax.jit(convolve))(jnp.ones((2, 1, 9)))
    assert contains_primitive(nested, "conv_general_dilated")
    assert not contains_primitive(small, "conv_general_dilated")
    assert choose_loop([small], is_sharded=False).runs_in_loop
    assert "2.0 MFLOP" in choose_loop([small], is_sharded=False).reason
    assert choose_loop([small, large], is_sharded=False) == (
        False,
        "a step has 2,000.0 MFLOP, which hides what a dispatch costs",
    )
    assert "conv_general_dilated is slower" in choose_loop([small, nested], is_sharded=False).reason
    many = jax.make_jaxpr(lambda *arrays: sum(arrays))(*[1.0] * 3_001)
    few = jax.make_jaxpr(lambda *arrays: sum(arrays))(*[1.0] * 3_000)
    assert choose_loop([few], is_sharded=False).runs_in_loop
    assert choose_loop([few, many], is_sharded=False) == (
        False,
        "XLA takes long to compile a loop over the 3,001 arrays of a step, which "
        "steps_per_execution=16 has it do",
    )
    assert choose_loop([small], is_sharded=True) == (
        False,
        "several steps were not measured on several devices",
    )


def test_small_steps_run_in_a_loop_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    small = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((700, 700)))
    large = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((800, 800)))
    assert choose_loop([small], is_sharded=False).runs_in_loop
    assert choose_loop([large], is_sharded=False) == (
        False,
        "a step has 1,024.0 MFLOP, which hides what a dispatch costs",
    )
    convolution = jax.make_jaxpr(partial(jax.lax.conv, window_strides=(1,), padding="SAME"))(
        jnp.ones((2, 1, 9)), jnp.ones((1, 1, 3))
    )
    assert choose_loop([convolution], is_sharded=False) == (
        False,
        "conv_general_dilated was not measured in a loop on the platform 'gpu'",
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "other")
    assert not choose_loop([small], is_sharded=False).runs_in_loop


def test_bytes_of_a_batch() -> None:
    batch = {"x": np.zeros((4, 3), np.float32), "label": np.zeros(4, np.int8)}
    assert count_batch_bytes(batch) == 4 * 3 * 4 + 4


@pytest.mark.full
def test_explanation_says_what_was_chosen() -> None:
    engine = fg.Engine(steps=4, log_every=2)
    assert engine.explain() == (
        "steps_per_execution: auto; fit chooses when it knows the model and the data"
    )
    engine.fit(Counting(), numbers(*[[0.0]] * 4))
    assert engine.explain().startswith("steps_per_execution: 2, because a step has 0.0 MFLOP")
    engine = fg.Engine(steps=4, log_every=None)
    engine.fit(Counting(), numbers([0.0]))
    assert engine.explain().startswith("steps_per_execution: 1, because each step is the end of an")
    assert fg.Engine(steps=1, steps_per_execution=3).explain() == (
        "steps_per_execution: 3, as it was given"
    )


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "many"])
def test_anything_else_is_an_error(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="steps_per_execution is"):
        fg.Engine(steps=1, steps_per_execution=number)


def test_batches_before_the_one_that_fails_are_trained_on() -> None:
    """As with single steps, and so a run resumes where the data failed."""
    saved: list[int] = []

    def yield_five() -> Iterator[np.ndarray]:
        for _ in range(5):
            yield np.zeros(1, np.float32)
        raise OSError("the disk is gone")

    class Saver:
        @fg.hookimpl
        def on_exception(self, run: fg.Run) -> None:
            saved.append(int(run.snapshot().state.step))

    engine = fg.Engine(steps=20, log_every=None, plugins=[Saver()])
    with pytest.raises(OSError, match="the disk is gone") as caught:
        engine.fit(Counting(), yield_five())
    assert saved == [5]
    assert "made the batch for step 6" in "".join(caught.value.__notes__)
    assert engine.explain().startswith("steps_per_execution: 16")


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("triggers", "steps"),
    [
        ([fg.Every(50)], 16),
        ([fg.Every(10)], 10),
        ([fg.Every(7), fg.Every(50)], 6),
        ([fg.Every(1)], 1),
        ([fg.At(3), fg.AtEnd()], 16),
        ([fg.EveryEpoch()], 4),
    ],
    ids=str,
)
def test_a_dispatch_is_no_longer_than_what_is_due(triggers: list[Any], steps: int) -> None:
    plugins = [
        Act(trigger, lambda run: None, "act", f"number{index}")
        for index, trigger in enumerate(triggers)
    ]
    engine = fg.Engine(steps=8, log_every=None, plugins=plugins)
    epoch = 4 if triggers == [fg.EveryEpoch()] else 40
    engine.fit(Counting(), numbers(*[[0.0]] * epoch))
    assert engine.explain().startswith(f"steps_per_execution: {steps},")
