"""What data is, in words and numbers: its stages, its first batch, and how fast each stage is."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.plugins import BatchIterator
from jax.tree_util import keystr

from fulgurite_data.batches import Batches
from fulgurite_data.counting import count_examples, count_tokens
from fulgurite_data.grouping import BatchNode
from fulgurite_data.indexing import ENDLESS
from fulgurite_data.nodes import Node
from fulgurite_data.passes import start_pass


@dataclass(frozen=True)
class StageSpeed:
    """How long a stage takes, in one thread.

    Attributes:
        stage: its line.
        seconds: without those of the stages before it.
        num_examples: that passed it meanwhile.
    """

    stage: str
    seconds: float
    num_examples: int

    @property
    def examples_per_second(self) -> float:
        """The examples a second, were it the only stage."""
        return self.num_examples / self.seconds if self.seconds else math.inf


def describe_data(data: Any) -> str:
    """Return the stages of data, its length, and its first batch as a table.

    Args:
        data: as of `fg.Engine.fit`, without its parts.
    """
    source = data.source if isinstance(data, fg.DataSource) else data
    with BatchIterator(data, seed=0, restore_on_close=True) as batches:
        batch = batches.peek()
        num_batches = batches.epoch_length
        promise = batches.resume or "not known"
        stages = source.node.stages if isinstance(source, Batches) else [batches.description]
    num_examples = count_examples(batch)
    lines = ["pipeline", *(f"  {stage}" for stage in stages), "", "length"]
    lines += [f"  {_format_count(num_batches)} batches an epoch, {num_examples:,} examples in one"]
    num_tokens = count_tokens(batch)
    if num_tokens is not None:
        # Packed rows have as many as fit; those of windows are all full.
        epoch = ""
        if num_batches is not None and num_batches < ENDLESS:
            epoch = f", about {num_tokens * num_batches:,} an epoch"
        lines.append(f"  {num_tokens:,} tokens in the first batch{epoch}")
    lines += [f"  {_format_bytes(_count_bytes(batch))} a batch", f"  resume: {promise}", ""]
    return "\n".join([*lines, "first batch", *_format_batch(batch)])


def read_first_batch(data: Any) -> Any:
    """Return the first batch of data.

    Args:
        data: as of `fg.Engine.fit`, without its parts.
    """
    with BatchIterator(data, seed=0, restore_on_close=True) as batches:
        return batches.peek()


def measure_stages(batches: Batches, num_batches: int) -> list[StageSpeed]:
    """Return how long each stage takes for some batches, in the order of the stages.

    Args:
        batches: of a pipeline.
        num_batches: how many are read, from the first.
    """
    nodes = _list_nodes(batches.node)
    clocks = {id(node): _Clock() for node in nodes}
    at = start_pass(0)
    num_examples = 0
    with _time_calls(nodes, clocks):
        for number in range(min(num_batches, len(batches))):
            num_examples += count_examples(batches.node.read_batch(number, at, (0, 1)))
    return [StageSpeed(node.stages[-1], clocks[id(node)].seconds, num_examples) for node in nodes]


def measure_reading(data: Any, num_batches: int) -> float | None:
    """Return how many examples a second are read as a fit reads them, with its threads and
    processes; None of data that ends with its first batch.

    Args:
        data: as of `fg.Engine.fit`, without its parts.
        num_batches: how many are read after the first.
    """
    with BatchIterator(data, seed=0, restore_on_close=True) as batches:
        next(batches)  # with which threads and processes start
        start = perf_counter()
        counts = [count_examples(item.batch) for item in islice(batches, num_batches)]
        return sum(counts) / (perf_counter() - start) if counts else None


class _Clock:
    """The time of a stage without that of the stages that it calls."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextmanager
def _time_calls(nodes: Sequence[Any], clocks: dict[int, _Clock]) -> Iterator[None]:
    """Note the time of each stage's calls within the block."""
    running: list[_Clock] = []

    def call(clock: _Clock, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        running.append(clock)
        try:
            return function(*arguments)
        finally:
            running.pop()
            seconds = perf_counter() - start
            clock.seconds += seconds
            if running:
                running[-1].seconds -= seconds

    # A stage that packs reads pieces of examples.
    calls = [
        (node, name)
        for node in nodes
        for name in (("read", "read_pieces") if isinstance(node, Node) else ("read_batch",))
    ]
    for node, name in calls:
        setattr(node, name, partial(call, clocks[id(node)], getattr(node, name)))
    try:
        yield
    finally:
        for node, name in calls:
            delattr(node, name)


def _list_nodes(node: Any) -> list[Any]:
    """Return a node and those before it, from the sources on, each once."""
    nodes: dict[int, Any] = {}
    for value in vars(node).values():
        held = value.values() if isinstance(value, dict) else value
        held = held if isinstance(value, list | tuple | dict) else [value]
        for parent in held:
            if isinstance(parent, Node | BatchNode):
                nodes.update((id(before), before) for before in _list_nodes(parent))
    nodes[id(node)] = node
    return list(nodes.values())


def _format_batch(batch: Any) -> list[str]:
    """Return a table of the arrays of a batch."""
    value = batch.value if isinstance(batch, fg.Batch) else batch
    rows = [("name", "dtype", "shape", "lowest", "mean", "highest", "begins with")]
    rows += [
        (keystr(path) or "(the batch)", *_describe_array(np.asarray(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    ]
    if isinstance(batch, fg.Batch) and batch.mask is not None:
        rows.append(("the mask", *_describe_array(np.asarray(batch.mask))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _describe_array(array: np.ndarray) -> tuple[str, ...]:
    native = jax.dtypes.canonicalize_dtype(array.dtype)
    dtype = str(array.dtype) if native == array.dtype else f"{array.dtype}, {native} for jax"
    is_complex = array.dtype.kind == "c"
    numbers = np.abs(array) if is_complex else array.astype(np.float64)
    statistics = ("", "", "")
    if array.size:
        statistics = tuple(f"{f(numbers):.4g}" for f in (np.min, np.mean, np.max))
    shown = array if is_complex else numbers  # as bfloat16 has no format of its own
    first = " ".join(f"{number:.4g}" for number in shown.reshape(-1)[:4])
    return dtype, str(list(array.shape)), *statistics, first


def _count_bytes(batch: Any) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch))


def _format_count(number: int | None) -> str:
    if number is None:
        return "an unknown number of"
    return "endless" if number >= ENDLESS else f"{number:,}"


def _format_bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} GB"
