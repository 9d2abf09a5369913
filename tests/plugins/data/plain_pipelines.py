"""A plain definition of pipelines, in lists: what every dataset is compared with.

A pipeline is a list of stages. `define` returns its examples epoch by epoch, `build` the dataset.
Random orders and random numbers cannot be defined a second time, so they are read once, from the
stage alone, and must be what the stage promises.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite_data import (
    Arrays,
    Dataset,
    Items,
    Statistics,
    Tokens,
    compute_statistics,
    mix,
    write_tokens,
    zip_datasets,
)

Example = dict[str, Any]


@dataclass(frozen=True)
class Pipeline:
    """A dataset with its definition.

    Attributes:
        dataset: the dataset.
        epochs: the examples of its first epochs, as the plain definition has them.
        is_fixed: whether they are the same in each epoch.
        text: what it is, to print.
    """

    dataset: Dataset
    epochs: list[list[Example]]
    is_fixed: bool
    text: str


def double(example: Example) -> Example:
    return {"x": example["x"] * 2}


def is_even_sum(example: Example) -> bool:
    return int(np.sum(example["x"])) % 3 != 1


def add_random(example: Example, rng: np.random.Generator) -> Example:
    return {"x": example["x"] + rng.integers(100)}


def make_source(rng: np.random.Generator, folder: Path, num_epochs: int) -> Pipeline:
    """Return a source of at least five examples, each a vector of three numbers."""
    size = int(rng.integers(5, 40))
    rows = rng.integers(0, 1000, (size, 3)).astype(np.int32)
    kind = rng.choice(["arrays", "memmap", "items", "tokens"])
    if kind == "arrays":
        dataset = Arrays({"x": rows})
    elif kind == "memmap":
        path = folder / f"{rng.integers(10**9)}.npy"
        np.save(path, rows)
        dataset = Arrays({"x": np.load(path, mmap_mode="r")})
    elif kind == "items":
        dataset = Items([{"x": row} for row in rows])
    else:
        flat = rows.reshape(-1)
        paths = [folder / f"{rng.integers(10**9)}-{n}.bin" for n in range(2)]
        cut = int(rng.integers(1, len(flat)))
        for path, part in zip(paths, (flat[:cut], flat[cut:]), strict=True):
            write_tokens(path, [part])
        windows = Tokens(paths).window(3, targets=False)
        dataset = windows.map(rename_tokens)
    return Pipeline(dataset, [[{"x": row} for row in rows]] * num_epochs, True, f"{kind}({size})")


def rename_tokens(example: Example) -> Example:
    return {"x": example["tokens"]}


def read_epochs(dataset: Dataset, num_epochs: int) -> list[list[Example]]:
    """Return the examples of the first epochs, read one by one."""
    return [
        [dataset.get(index, epoch=epoch) for index in range(len(dataset))]
        for epoch in range(num_epochs)
    ]


def extend(pipeline: Pipeline, rng: np.random.Generator, workers: dict[str, Any]) -> Pipeline:
    """Return a pipeline with one random stage more."""
    stages = ["shuffle", "take", "skip", "shard", "map", "random", "repeat", "window", "normalize"]
    # A source of several has random numbers of its own, which no definition knows, and a plan is
    # of examples that do not change.
    stages += ["filter", "mix", "zip", "pack"] if pipeline.is_fixed else []
    stage = rng.choice(stages)
    dataset, epochs = pipeline.dataset, pipeline.epochs
    size = len(epochs[0])
    number = int(rng.integers(1, size))
    is_fixed = pipeline.is_fixed and stage not in ("shuffle", "random")
    if stage in ("shuffle", "random"):
        dataset = dataset.shuffle() if stage == "shuffle" else dataset.map(add_random, rng=True)
        before, epochs = epochs, read_epochs(dataset, len(epochs))
        check_promise(stage, before, epochs)
    elif stage in ("take", "skip", "shard"):
        dataset, epochs = take_part(stage, number, dataset, epochs)
    elif stage == "map":
        dataset = dataset.map(double, **workers)
        epochs = [[double(example) for example in epoch] for epoch in epochs]
    elif stage == "filter":
        passing = [example for example in epochs[0] if is_even_sum(example)]
        if passing:
            dataset, epochs = dataset.filter(is_even_sum), [passing] * len(epochs)
    elif stage == "repeat":
        dataset = dataset.repeat(2)
        # What the definition has of epochs is all that can be repeated.
        pairs = zip(epochs[::2], epochs[1::2], strict=False)
        epochs = [first + second for first, second in pairs]
    elif stage == "normalize":
        dataset, epochs = normalize(pipeline, rng)
    elif stage in ("window", "pack"):
        dataset, epochs = regroup(stage, dataset, epochs)
    else:
        dataset, epochs = join(stage, dataset, epochs)
    return Pipeline(dataset, epochs, is_fixed, f"{pipeline.text}.{stage}({number})")


def take_part(
    stage: str, number: int, dataset: Dataset, epochs: list[list[Example]]
) -> tuple[Dataset, list[list[Example]]]:
    """Return a dataset of the first examples, of the others, or of the second half."""
    if stage == "take":
        return dataset.take(number), [epoch[:number] for epoch in epochs]
    if stage == "skip":
        return dataset.skip(number), [epoch[number:] for epoch in epochs]
    return dataset.shard(1, 2), [epoch[(len(epoch) + 1) // 2 :] for epoch in epochs]


def regroup(
    stage: str, dataset: Dataset, epochs: list[list[Example]]
) -> tuple[Dataset, list[list[Example]]]:
    """Return a dataset of windows, or of rows of two examples, of which the first is left."""
    if stage == "window":
        return dataset.window(1).map(take_first), epochs
    packed = dataset.pack(6, how="split").map(keep_first_half)
    return packed, [epoch[::2] for epoch in epochs]


def normalize(pipeline: Pipeline, rng: np.random.Generator) -> tuple[Dataset, list[list[Example]]]:
    """Return a dataset of normalized numbers, made integers again, and its definition.

    Deviations are powers of two, so that all numbers are exact. The statistics of the dataset
    itself are compared with those of all its numbers.
    """
    rows = np.array([example["x"] for example in pipeline.epochs[0]], np.float64)
    if pipeline.is_fixed:
        moments = compute_statistics(pipeline.dataset, "x")
        np.testing.assert_allclose(moments.mean["x"], rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.std["x"], rows.std(0), rtol=1e-9, atol=1e-9)
    shape = [(3,), (1,), ()][rng.integers(3)]
    mean = rng.integers(-50, 50, shape).astype(np.float64)
    std = 2.0 ** rng.integers(0, 3, shape)
    statistics = Statistics({"x": mean}, {"x": std}, {"x": 1})
    epochs = [
        [{"x": ((example["x"] - mean) / std * 4).astype(np.int64)} for example in epoch]
        for epoch in pipeline.epochs
    ]
    return pipeline.dataset.normalize(statistics).map(quadruple), epochs


def quadruple(example: Example) -> Example:
    assert example["x"].dtype == np.float32
    return {"x": (example["x"] * 4).astype(np.int32)}


def join(
    stage: str, dataset: Dataset, epochs: list[list[Example]]
) -> tuple[Dataset, list[list[Example]]]:
    """Return a dataset of this one and another, and its definition."""
    size = len(epochs[0])
    other = Arrays({"x": np.arange(3000, dtype=np.int32).reshape(-1, 3)})
    extra = [{"x": np.arange(3 * i, 3 * i + 3)} for i in range(2 * size)]
    if stage == "zip":
        zipped = zip_datasets({"x": dataset, "y": other}, length="min").map(add_pair)
        pairs = [zip(epoch, extra, strict=False) for epoch in epochs]
        return zipped, [[{"x": a["x"] + b["x"]} for a, b in pair] for pair in pairs]
    length = size * 3 // 2
    mixed = mix([dataset, other], [2, 1])
    return mixed, [interleave(epoch, extra, length) for epoch in epochs]


def add_pair(example: Example) -> Example:
    return {"x": example["x"]["x"] + example["y"]["x"]}


def keep_first_half(row: Example) -> Example:
    return {"x": row["x"][:3]}


def take_first(example: Example) -> Example:
    return {"x": example["x"][0]}


def interleave(first: list[Example], second: list[Example], length: int) -> list[Example]:
    """Return two examples of the first, one of the second, and so on."""
    return [
        second[place // 3] if place % 3 == 2 else first[place // 3 * 2 + place % 3]
        for place in range(length)
    ]


def check_promise(stage: str, before: list[list[Example]], after: list[list[Example]]) -> None:
    """Check that a random stage gives what it promises, whatever it draws."""
    for old, new in zip(before, after, strict=True):
        old_rows, new_rows = (np.array([example["x"] for example in rows]) for rows in (old, new))
        if stage == "shuffle":
            assert sorted(map(tuple, old_rows)) == sorted(map(tuple, new_rows))
        else:
            added = new_rows - old_rows
            assert (added == added[:, :1]).all()
            assert (0 <= added).all()
            assert (added < 100).all()
