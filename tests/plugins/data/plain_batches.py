"""A plain definition of batches, in lists: what those of every dataset are compared with.

A definition is the batches of each epoch, each a dictionary of arrays of its real examples, without
rows of padding.
"""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite_data import Batches
from plain_pipelines import Example, Pipeline

Batch = dict[str, np.ndarray]
SIZES = {1: 8, 3: 4}
"""How many examples are in a batch, by the length that they are padded to."""


@dataclass(frozen=True)
class PlainBatches:
    """Batches with their definition.

    Attributes:
        batches: the batches.
        epochs: the batches of its first epochs, as the plain definition has them.
        counts: how many processes may share each of them.
        text: what they are, to print.
    """

    batches: Batches
    epochs: list[list[Batch]]
    counts: list[int]
    text: str


def get_real_rows(batch: Any) -> Batch:
    """Return the arrays of a batch without rows of padding."""
    if not isinstance(batch, fg.Batch):
        return batch
    return {name: array[batch.mask] for name, array in batch.value.items()}


def is_equal(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


def make_batches(pipeline: Pipeline, rng: np.random.Generator) -> PlainBatches | None:
    """Return batches of examples, of one size or by length; None if there are none."""
    remainder: Any = str(rng.choice(["keep", "drop", "pad"]))
    kind = str(rng.choice(["plain", "ragged", "bucket"][: 2 + pipeline.is_fixed]))
    size = int(rng.choice([2, 4, 8]))
    dataset, examples = pipeline.dataset, pipeline.epochs
    if kind != "plain":
        dataset = dataset.map(cut)
        examples = [[cut(example) for example in epoch] for epoch in examples]
    if kind == "bucket":
        epochs = [bucket(epoch, remainder) for epoch in examples]
    else:
        epochs = [group(epoch, size, remainder) for epoch in examples]
    if not epochs[0]:
        return None
    if kind == "bucket":
        batches = dataset.bucket(SIZES, remainder=remainder)
    else:
        batches = dataset.batch(size, remainder=remainder)
    if kind == "ragged":
        batches = batches.map(pad_by_hand)
    smallest = 4 if kind == "bucket" else size
    sizes = [len(batch["x"]) for batch in epochs[0]] if remainder == "keep" else []
    counts = [n for n in (1, 2, 4) if all(number % n == 0 for number in (smallest, *sizes))]
    return PlainBatches(batches, epochs, counts, f"{pipeline.text}.{kind}({size}, {remainder})")


def group(examples: list[Example], size: int, remainder: str) -> list[Batch]:
    """Return consecutive examples in batches of one size."""
    parts = [examples[low : low + size] for low in range(0, len(examples), size)]
    return [{"x": pad(part, 3)["x"]} for part in parts if len(part) == size or remainder != "drop"]


def bucket(examples: list[Example], remainder: str) -> list[Batch]:
    """Return batches of similar lengths, as a stream would complete them."""
    waiting: dict[int, list[int]] = {length: [] for length in SIZES}
    complete = []
    for index, example in enumerate(examples):
        length = min(length for length in SIZES if length >= len(example["x"]))
        waiting[length].append(index)
        if len(waiting[length]) == SIZES[length]:
            complete.append((length, waiting[length]))
            waiting[length] = []
    rest = [(length, part) for length, part in waiting.items() if part and remainder != "drop"]
    ordered = complete + sorted(rest, key=lambda batch: batch[1][-1])
    return [pad([examples[i] for i in part], length) for length, part in ordered]


def pad(examples: list[Example], length: int) -> Batch:
    """Return examples with zeros at their ends, and a mask."""
    rows = np.zeros((len(examples), length), np.int64)
    mask = np.zeros(rows.shape, bool)
    for row, example in enumerate(examples):
        rows[row, : len(example["x"])] = example["x"]
        mask[row, : len(example["x"])] = True
    return {"x": rows, "mask": mask}


def cut(example: Example) -> Example:
    return {"x": example["x"][: abs(int(example["x"][0])) % 4]}


def pad_by_hand(batch: Any) -> Any:
    """Return a batch of examples of up to three numbers with three for each."""
    padded = np.zeros((len(batch["x"]), 3), np.int64)
    for row, numbers in zip(padded, batch["x"], strict=True):
        row[: len(numbers)] = numbers
    return {"x": padded}


def add_sums(batch: Any) -> Any:
    return {**batch, "sums": batch["x"].sum(axis=1)}


def subtract(batch: Any) -> Any:
    return {**batch, "x": 1 - batch["x"]}


def extend_batches(plain: PlainBatches, rng: np.random.Generator) -> PlainBatches:
    """Return batches with one random stage more."""
    batches, epochs = plain.batches, plain.epochs
    size = len(epochs[0])
    stages = ["shuffle", "subtract", "sums"]
    stages += ["take", "skip"] if size > 1 else []
    stages += ["repeat"] if len(epochs) >= 4 else []
    stage = rng.choice(stages)
    number = int(rng.integers(1, max(size, 2)))
    if stage == "shuffle":
        batches = batches.shuffle()
        epochs = [read_in_any_order(batches, n, epoch) for n, epoch in enumerate(epochs)]
    elif stage == "take":
        batches, epochs = batches.take(number), [epoch[:number] for epoch in epochs]
    elif stage == "skip":
        batches, epochs = batches.skip(number), [epoch[number:] for epoch in epochs]
    elif stage == "repeat":
        batches = batches.repeat(2)
        pairs = zip(epochs[::2], epochs[1::2], strict=False)
        epochs = [first + second for first, second in pairs]
    else:
        function = subtract if stage == "subtract" else add_sums
        batches = batches.map(function)
        epochs = [[function(batch) for batch in epoch] for epoch in epochs]
    return PlainBatches(batches, epochs, plain.counts, f"{plain.text}.{stage}({number})")


def read_in_any_order(batches: Batches, number: int, epoch: list[Batch]) -> list[Batch]:
    """Return the batches of an epoch as they come: those of the definition, in any order."""
    rows = [get_real_rows(batches.read(index, epoch=number)) for index in range(len(batches))]
    left = [*epoch]
    for row in rows:
        place = next(index for index, other in enumerate(left) if is_equal(row, other))
        del left[place]
    assert not left
    return rows
