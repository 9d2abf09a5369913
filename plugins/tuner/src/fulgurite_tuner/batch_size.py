"""The largest batch that fits into the memory of a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    FulguriteError,
    as_int,
    check_one_of,
    check_positive_int,
)
from fulgurite.plugins import get_split

from fulgurite_tuner.trial import make_trial_engine

Search = Literal["power", "bisect"]

_LONG_STOP = 2**30
_LONG_RANGE = fg.StepRange(0, _LONG_STOP, tuple(range(1, 1001)))
"""The steps of a run of many short epochs: whatever changes during it has changed at its end."""


@dataclass(frozen=True)
class BatchSizes:
    """What batches of several sizes need.

    Example:
        from fulgurite_tuner import BatchSizes

        sizes = BatchSizes(96, 1_000_000, {8: 100_000, 16: 180_000})

    Attributes:
        suggestion: the largest size that fits, on every process.
        limit: the bytes that a step may take.
        num_bytes: the bytes of the step that was compiled for a size.
    """

    suggestion: int
    limit: int
    num_bytes: dict[int, int]


def find_batch_size(
    engine: fg.Engine,
    model: Any,
    data: Any,
    *,
    limit: int | None = None,
    fraction: float = 0.9,
    start: int = 8,
    max_size: int | None = None,
    search: Search = "power",
) -> BatchSizes:
    """Return the largest size of a batch whose training step fits into memory.

    Two small sizes are compiled; the memory of a step grows linearly from there. What follows from
    that is compiled, and one step is made with it. Where what is trained changes during the run, as
    by `Freeze`, the larger need of begin and end counts. Model, engine, data and files are as
    before, also after an exception.

    Several processes call it together and find the same: the memory of the smallest device counts,
    and the largest need. The size is that of the batch that each of them reads; `batch_size` of
    `fg.ArrayData` counts the examples of all.

    Args:
        engine: whose plugins change the update, and that says where it is computed.
        model: what `Engine.fit` takes.
        data: what `Engine.fit` takes; the examples of its first batch are repeated.
        limit: the bytes that a step may take; by default those of the device.
        fraction: the part of the limit that is used.
        start: the smaller size that is compiled, and the first power tried; rounded up to a
            multiple of the devices of this process among which a batch may be divided, as all
            sizes are.
        max_size: the largest size.
        search: `power` for `start` times a power of two, `bisect` for any size.

    Raises:
        ConfigurationError: the device does not tell its memory, or not even one example fits.
        DataError: there is no batch, or its arrays begin with different lengths.
    """
    start, limit, max_size = as_int(start), as_int(limit), as_int(max_size)
    check_positive_int(start, "find_batch_size: start")
    check_one_of(search, get_args(Search), "find_batch_size: search")
    # Sizes are counted in parts that can be divided among the devices.
    part = _count_local_devices(engine)
    _check_bounds(limit, fraction, max_size, part)
    limits = engine.sharding.sync.all_gather("batch limit", limit or _read_limit(engine))
    limit = math.floor(fraction * min(limits))
    steps = _MeasuredSteps(engine, model, _take_batch(engine, data), part)
    start = math.ceil(start / part)
    max_parts = None if max_size is None else max_size // part
    num_parts = _find_most_parts(steps.measure, limit, search, start, max_parts)
    if num_parts < 1:
        smallest = "one example" if part == 1 else f"{part} examples, one a device,"
        raise ConfigurationError(
            f"find_batch_size: not even {smallest} fits into {limit:,} bytes; the step takes "
            f"{steps.measure(start):,} for {start * part}"
        )
    return BatchSizes(num_parts * part, limit, steps.num_bytes)


@dataclass
class _MeasuredSteps:
    """Steps on batches of several sizes, each of which is made once.

    Attributes:
        engine: the engine.
        model: the model.
        examples: a batch, which is repeated.
        part: the number of examples of a part.
        num_bytes: what was measured, by the size of the batch.
    """

    engine: fg.Engine
    model: Any
    examples: Any
    part: int
    num_bytes: dict[int, int] = field(default_factory=dict)

    def measure(self, num_parts: int) -> int:
        """Return the bytes that a step on so many parts takes."""
        size = num_parts * self.part
        if size not in self.num_bytes:
            self.num_bytes[size] = _measure_on_all(self.engine, self.model, self.examples, size)
        return self.num_bytes[size]


def _find_most_parts(
    measure: Callable[[int], int], limit: int, search: Search, start: int, max_parts: int | None
) -> int:
    """Return the largest number of parts whose step fits, after trying it; 0 if none does.

    Args:
        measure: the bytes that the step of so many parts takes.
        limit: the bytes that it may take.
        search: as for `find_batch_size`.
        start: the smaller number that is measured.
        max_parts: the largest number.
    """
    slope = (measure(2 * start) - measure(start)) / start

    def fits(num_parts: int) -> bool:
        return measure(start) + slope * (num_parts - start) <= limit

    num_parts = find_largest(fits, search=search, start=start, max_size=max_parts)
    # The line is a prediction, and the compiler may have another plan for large arrays: then the
    # line continues through what was measured.
    while num_parts > 0:
        need = _measure_trial(measure, num_parts)
        if need is not None and need <= limit:
            break
        if need is not None and num_parts > start:
            slope = max(slope, (need - measure(start)) / (num_parts - start))
        largest = num_parts - 1 if need is not None else num_parts // 2
        num_parts = find_largest(fits, search=search, start=start, max_size=largest)
    return num_parts


def find_largest(
    fits: Callable[[int], bool],
    *,
    search: Search,
    start: int,
    max_size: int | None = None,
    margin: float = 0.0,
) -> int:
    """Return the largest size that fits, 0 if none does.

    Args:
        fits: whether a size fits; a larger size than one that does not fit does not either.
        search: `power` doubles, or halves, from `start`; `bisect` gives the largest size.
        start: the first size.
        max_size: the largest size; by default 2**30.
        margin: the part of the size that is given away for safety.
    """
    largest = 2**30 if max_size is None else max_size
    if largest < 1:
        return 0
    size = min(start, largest)
    if fits(size):
        while 2 * size <= largest and fits(2 * size):
            size *= 2
    else:
        while size > 0 and not fits(size):
            size //= 2
    if search == "bisect" and size > 0:
        high = min(2 * size, largest + 1)
        while high - size > 1:
            middle = (size + high) // 2
            size, high = (middle, high) if fits(middle) else (size, middle)
    return math.floor(size * (1 - margin))


class _Memory:
    """Notes the memory of the executable of a step, of several the largest."""

    num_bytes = 0

    @fg.hookimpl
    def on_compile(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Add up arguments, outputs and what is needed in between."""
        if name != "step":
            return
        memory: Any = compiled.memory_analysis()
        num_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        self.num_bytes = max(self.num_bytes, num_bytes)


def _measure_step(engine: fg.Engine, model: Any, examples: Any, size: int) -> int:
    """Return the bytes of a step on a batch of a size, after making it once at the begin of a run
    and once at its end."""
    memory = _Memory()
    trial = make_trial_engine(engine, memory)
    batch = jax.tree.map(
        lambda leaf: np.resize(leaf, (size, *leaf.shape[1:])) if leaf.shape else leaf, examples
    )
    state = trial.init_state(model, [batch])
    state, _ = trial.step(state, batch, step_range=_LONG_RANGE)
    last: Any = jax.device_put(np.int32(_LONG_STOP), state.step.sharding)
    # The same executable, if nothing changes in between.
    state, _ = trial.step(state.replace(step=last), batch, step_range=_LONG_RANGE)
    jax.block_until_ready(state.step)
    return memory.num_bytes


def _measure_on_all(engine: fg.Engine, model: Any, examples: Any, size: int) -> int:
    """Return the most bytes that a step takes on any process.

    Args:
        engine: the engine.
        model: the model.
        examples: a batch.
        size: of the batch.

    Raises:
        _OutOfMemoryError: the step did not fit on some process.
    """
    num_bytes = None
    failure = None
    try:
        num_bytes = _measure_step(engine, model, examples, size)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            failure = error
    except Exception as error:
        failure = error
    engine.sharding.raise_on_any_process(failure)
    needs = engine.sharding.sync.all_gather("batch bytes", num_bytes)
    if None in needs:
        raise _OutOfMemoryError(f"find_batch_size: a step of {size} examples ran out of memory")
    return max(needs)


class _OutOfMemoryError(FulguriteError):
    """A step that does not fit."""


def _measure_trial(measure: Callable[[int], int], num_parts: int) -> int | None:
    """Return the bytes of a step, None if it ran out of memory."""
    try:
        return measure(num_parts)
    except _OutOfMemoryError:
        return None


def _count_local_devices(engine: fg.Engine) -> int:
    """Return among how many devices of this process a batch may be divided."""
    mesh = engine.sharding.mesh
    return 1 if mesh is None else len(mesh.local_devices)


def _check_bounds(
    limit: int | None, fraction: float, max_size: int | None, num_devices: int
) -> None:
    """Raise a ConfigurationError if no batch could be within these bounds.

    Args:
        limit, fraction, max_size: those of `find_batch_size`.
        num_devices: among how many devices a batch is divided.
    """
    is_number = isinstance(fraction, Real) and not isinstance(fraction, bool)
    if not is_number or not 0 < fraction <= 1:
        raise ConfigurationError(
            f"find_batch_size: fraction is {fraction!r}; it must be above 0 and at most 1"
        )
    if limit is not None:
        check_positive_int(limit, "find_batch_size: limit")
    if max_size is None:
        return
    check_positive_int(max_size, "find_batch_size: max_size")
    if max_size < num_devices:
        raise ConfigurationError(
            f"find_batch_size: max_size is {max_size}, and a batch is divided among {num_devices} "
            "devices, each of which takes one example at least"
        )


def _take_batch(engine: fg.Engine, data: Any) -> Any:
    """Return the first batch that this process reads, as NumPy arrays.

    Args:
        engine: says what each process reads.
        data: what `Engine.fit` takes.
    """
    source = make_trial_engine(engine).iter_batches(get_split(data, "train"), steps=1)
    for batch in source:
        if isinstance(batch, fg.Batch) and batch.mask is not None:
            batch = replace(batch, mask=np.ones(batch.mask.shape, bool))
        batch = jax.tree.map(np.asarray, batch)
        lengths = sorted({len(leaf) for leaf in jax.tree.leaves(batch) if leaf.shape})
        if len(lengths) != 1:
            listed = ", ".join(map(str, lengths)) or "none"
            raise DataError(
                "find_batch_size: the arrays of a batch do not begin with one length (there is "
                f"{listed}), so that it has no size: choose its parts by hand"
            )
        return batch
    raise DataError("find_batch_size: the data holds no batch")


def _read_limit(engine: fg.Engine) -> int:
    device = engine.device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigurationError(
            f"find_batch_size: {device} does not tell how much memory it has: give limit="
        )
    return int(stats["bytes_limit"])
