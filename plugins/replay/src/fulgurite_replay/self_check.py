"""Steps that are made twice, so that a device that computes wrong numbers is noticed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import (
    as_trigger,
    get_device_arrays,
    hide_constructor_frames,
    is_exact,
    leaves_with_paths,
)
from jaxtyping import Array, Bool, Shaped

from fulgurite_replay.digests import (
    as_plain,
    as_words,
    commit,
    digest_state,
    list_arrays,
    list_paths,
)


class CorruptionError(FulguriteError):
    """A step that gave three different results from the same state and batch.

    Example:
        from fulgurite_replay import CorruptionError

        print(CorruptionError(100, "module.weight"))

    Attributes:
        step: its number.
        path: of the first array that differs.

    Args:
        step: becomes an attribute.
        path: becomes an attribute.
    """

    def __init__(self, step: int, path: str) -> None:
        super().__init__(
            f"step {step} was made three times from the same state and batch, and {path} came out "
            "differently each time. Either the device computes wrong numbers, or the program is "
            "not deterministic: on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true, and run "
            "without SelfCheck to train all the same"
        )
        self.step = step
        self.path = path


@dataclass(frozen=True)
class _Before(fg.Trigger):
    """The steps right before those of another trigger.

    Attributes:
        trigger: the other one.
    """

    trigger: fg.Trigger

    def _next_after(self, after: int, step_range: fg.StepRange) -> int | None:
        step = self.trigger.next(after + 1, step_range)
        return None if step is None else step - 1


@dataclass(frozen=True)
class _Repetition:
    """What a step was made of, and what came out.

    Attributes:
        state: the state before it.
        batch: its batch.
        result: the state after it.
    """

    state: fg.TrainState
    batch: Any
    result: fg.TrainState


@dataclass
class _Memory:
    """What is kept from before a step that is checked until after it.

    Attributes:
        repetition: of the step; None where none is checked.
    """

    repetition: _Repetition | None = None


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class SelfCheck(fg.Plugin):
    """Makes some steps twice, from copies of state and batch, and compares all arrays bit by bit.

    Where they differ, the step is made a third time, and the run continues from the result that
    came out twice; a message names the step, the array and the devices. Forward pass, backward pass
    and optimizer are repeated. Such a step needs memory for two states more.

    Example:
        from fulgurite_replay import SelfCheck

        engine = fg.Engine(steps=1000, plugins=[SelfCheck(every=100)])

    Args:
        every: which steps: an interval, or a trigger.

    Raises:
        CorruptionError: in a fit, if three repetitions differ.
    """

    plugin_name = "self_check"

    every: int | fg.Trigger = 100
    _memory = fg.PerFit(_Memory)

    def __post_init__(self) -> None:
        if not is_exact(as_trigger(self.every)):
            raise ConfigurationError(
                f"SelfCheck: every is {self.every!r}, which depends on the clock, and a step is "
                "repeated before it is known how long it takes: give an interval in steps"
            )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Make a step beforehand, and compare once the fit has made it: first of all, so that
        nothing is logged or saved of a wrong one, and no other action has changed it."""
        trigger = as_trigger(self.every)
        return [
            fg.ScheduledAction("compare", trigger, self._compare, stage="evaluate", before=("*",)),
            fg.ScheduledAction("repeat", _Before(trigger), self._repeat, stage="save"),
        ]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Make the first step beforehand, where that is to be checked."""
        if _Before(as_trigger(self.every)).next(run.step - 1, run.step_range) == run.step:
            self._repeat(run)

    def _repeat(self, run: fg.Run) -> None:
        """Make the next step on a copy, and keep what is needed to make it again."""
        item = run.data_iterator.look_ahead(0)
        self._memory.repetition = None
        if item is None or run.stop_reason is not None or run.step == run.step_range.stop:
            return
        batch = fg.ArrayData.gather(get_device_arrays(run.data), item.batch)
        # Nothing waits: the device has both steps to make while the batches after them are read.
        state, consumed = _copy_twice(run.unchecked_state)
        result, _ = run.engine.step(consumed, batch, step_range=run.step_range)
        self._memory.repetition = _Repetition(state, batch, result)

    def _compare(self, run: fg.Run) -> fg.ReplaceState | None:
        """Compare the step that the fit has made with the one on the copy."""
        repetition = self._memory.repetition
        self._memory.repetition = None
        if repetition is None:
            return None
        state = run.unchecked_state
        path = _find_difference(state, repetition.result)
        if path is None:
            return None
        third, _ = run.engine.step(repetition.state, repetition.batch, step_range=run.step_range)
        digests = [digest_state(result) for result in (state, repetition.result, third)]
        if digests[2] not in digests[:2]:
            raise CorruptionError(run.step, path)
        devices = ", ".join(_iter_devices(path, state, repetition.result))
        is_wrong = digests[2] == digests[1]
        which = "the step of the run" if is_wrong else "its repetition"
        run.notify(
            self.registered_name,
            f"step {run.step} gave two results: {path} differed on {devices}. Made a third time, "
            f"{which} was wrong; the run continues from the other one",
        )
        return fg.ReplaceState(third) if is_wrong else None


def _copy_twice(state: fg.TrainState) -> tuple[fg.TrainState, fg.TrainState]:
    """Return two states with copies of each array, made by one program."""
    leaves, structure = jax.tree.flatten(state)
    arrays = [commit(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]

    def replace_arrays(copies: list[Array]) -> fg.TrainState:
        rest = iter(copies)
        new_leaves = [next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return jax.tree.unflatten(structure, new_leaves)

    first, second = _copy_all_twice(arrays)
    return replace_arrays(first), replace_arrays(second)


@jax.jit
def _copy_all_twice(arrays: list[Array]) -> tuple[list[Array], list[Array]]:
    return [jnp.copy(array) for array in arrays], [jnp.copy(array) for array in arrays]


def _find_difference(first: fg.TrainState, second: fg.TrainState) -> str | None:
    """Return the path of the first array whose bits differ; None if there is none."""
    is_different = np.asarray(_compare_all(list_arrays(first), list_arrays(second)))
    if not is_different.any():
        return None
    return list_paths(first)[int(np.argmax(is_different))]


@jax.jit
def _compare_all(
    first: list[Shaped[Array, "..."]], second: list[Shaped[Array, "..."]]
) -> Bool[Array, " arrays"]:
    """Return of which arrays a bit differs."""
    pairs = zip(first, second, strict=True)
    return jnp.stack([jnp.any(as_words(left) != as_words(right)) for left, right in pairs])


def _iter_devices(path: str, first: fg.TrainState, second: fg.TrainState) -> Iterator[str]:
    """Yield the devices on which an array of two states differs."""
    arrays = [dict(leaves_with_paths(state))[path] for state in (first, second)]
    if not all(isinstance(array, jax.Array) for array in arrays):
        return
    shards = zip(*(as_plain(array).addressable_shards for array in arrays), strict=True)
    for left, right in shards:
        if np.asarray(left.data).tobytes() != np.asarray(right.data).tobytes():
            yield str(left.device)
