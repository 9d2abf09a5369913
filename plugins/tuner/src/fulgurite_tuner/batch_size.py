"""The largest batch that fits into the memory of a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import fulgurite as fg
import jax
import numpy as np
from fulgurite.data.sources import get_split
from fulgurite.errors import ConfigurationError, DataError, check_one_of, check_positive_int

from fulgurite_tuner.trial import make_trial_engine

Search = Literal["power", "bisect"]


@dataclass(frozen=True)
class BatchSizes:
    """What batches of several sizes need.

    Example:
        from fulgurite_tuner import BatchSizes

        sizes = BatchSizes(96, 1_000_000, {8: 100_000, 16: 180_000})

    Attributes:
        suggestion: the largest size that fits.
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
    that is compiled, and one step is made with it. Model, engine, data and files are as before,
    also after an exception.

    Args:
        engine: whose plugins change the update, and that says where it is computed.
        model: what `Engine.fit` takes.
        data: what `Engine.fit` takes; the examples of its first batch are repeated.
        limit: the bytes that a step may take; by default those of the device.
        fraction: the part of the limit that is used.
        start: the smaller size that is compiled, and the first power tried.
        max_size: the largest size.
        search: `power` for `start` times a power of two, `bisect` for any size.

    Raises:
        ConfigurationError: the device does not tell its memory, or not even one example fits.
        DataError: there is no batch.
    """
    check_positive_int(start, "find_batch_size: start")
    check_one_of(search, get_args(Search), "find_batch_size: search")
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            f"find_batch_size: fraction is {fraction!r}; it must be above 0 and at most 1"
        )
    limit = math.floor(fraction * (limit or _read_limit(engine)))
    num_bytes: dict[int, int] = {}
    examples = _take_batch(data)

    def measure(size: int) -> int:
        if size not in num_bytes:
            num_bytes[size] = _measure_step(engine, model, examples, size)
        return num_bytes[size]

    slope = (measure(2 * start) - measure(start)) / start
    offset = measure(start) - slope * start

    def fits(size: int) -> bool:
        return offset + slope * size <= limit

    size = find_largest(fits, search=search, start=start, max_size=max_size)
    # The line is a prediction, and the compiler may have another plan for large arrays.
    while size > 1 and not _fits_in_a_trial(measure, size, limit):
        size = size // 2 if search == "power" else math.floor(0.95 * size)
    if size < 1:
        raise ConfigurationError(
            f"find_batch_size: not even one example fits into {limit:,} bytes; the step takes "
            f"{math.ceil(offset + slope):,}"
        )
    return BatchSizes(size, limit, num_bytes)


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
    """Notes the memory of the executable of a step."""

    num_bytes = 0

    @fg.hookimpl
    def on_compile(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Add up arguments, outputs and what is needed in between."""
        if name != "step":
            return
        memory: Any = compiled.memory_analysis()
        self.num_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )


def _measure_step(engine: fg.Engine, model: Any, examples: Any, size: int) -> int:
    """Return the bytes of a step on a batch of a size, after making it once."""
    memory = _Memory()
    trial = make_trial_engine(engine, memory)
    batch = jax.tree.map(lambda leaf: np.resize(leaf, (size, *leaf.shape[1:])), examples)
    state = trial.init_state(model, [batch])
    state, _ = trial.step(state, batch)
    jax.block_until_ready(state.step)
    return memory.num_bytes


def _fits_in_a_trial(measure: Callable[[int], int], size: int, limit: int) -> bool:
    try:
        return measure(size) <= limit
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False


def _take_batch(data: Any) -> Any:
    """Return the first batch of data, as NumPy arrays."""
    source = fg.Engine(steps=1, autoload=False).iter_batches(get_split(data, "train"), steps=1)
    for batch in source:
        value = batch.batch if isinstance(batch, fg.MaskedBatch) else batch
        return jax.tree.map(np.asarray, value)
    raise DataError("find_batch_size: the data holds no batch")


def _read_limit(engine: fg.Engine) -> int:
    device = engine.device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigurationError(
            f"find_batch_size: {device} does not tell how much memory it has: give limit="
        )
    return int(stats["bytes_limit"])
