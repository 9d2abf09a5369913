"""Random pipelines against their plain definition: read in batches, by several processes, by
workers, and stopped and resumed at any batch with other processes and workers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import BatchIterator
from fulgurite_data import Batches
from plain_batches import (
    Batch,
    PlainBatches,
    extend_batches,
    get_real_rows,
    is_equal,
    make_batches,
)
from plain_pipelines import Pipeline, extend, make_source

NUM_EPOCHS = 4


def make_pipeline(seed: int, folder: Path, workers: dict[str, int]) -> Pipeline:
    rng = np.random.default_rng(seed)
    pipeline = make_source(rng, folder, NUM_EPOCHS)
    for _ in range(int(rng.integers(0, 6))):
        longer = extend(pipeline, rng, workers)
        # A definition that ran out of epochs, or of examples, ends here.
        if len(longer.epochs) < 2 or len(longer.epochs[0]) < 2:
            break
        pipeline = longer
    return pipeline


def make_plain_batches(seed: int, folder: Path, workers: dict[str, int]) -> PlainBatches | None:
    pipeline = make_pipeline(seed, folder, workers)
    rng = np.random.default_rng(2000 + seed)
    plain = make_batches(pipeline, rng)
    for _ in range(int(rng.integers(0, 4))):
        plain = None if plain is None else extend_batches(plain, rng)
    return plain


def read_with_processes(
    batches: Batches, count: int, position: Any, num_batches: int
) -> tuple[list[Batch], Any]:
    """Return the next batches, put together from the parts of all processes, and the position after
    them, which is the same for each process."""
    parts, positions = [], []
    for index in range(count):
        with BatchIterator(batches, seed=0, position=position, process=(index, count)) as iterator:
            items = [next(iterator) for _ in range(num_batches)]
        parts.append([get_real_rows(item.batch) for item in items])
        positions.append(items[-1].position)
    assert all(other == positions[0] for other in positions)
    joined = [
        {name: np.concatenate([part[name] for part in batch]) for name in batch[0]}
        for batch in zip(*parts, strict=True)
    ]
    return joined, json.loads(json.dumps(positions[0]))


def find_shapes(batches: Iterable[Any]) -> set[str]:
    return {str(jax.tree.map(np.shape, batch)) for batch in batches}


def check_pipeline(seed: int, folder: Path, *worker_options: dict[str, int]) -> None:
    sources = [make_plain_batches(seed, folder, options) for options in worker_options]
    plain = sources[0]
    if plain is None:
        return
    print(plain.text)
    rng = np.random.default_rng(1000 + seed)
    expected = [batch for epoch in plain.epochs for batch in epoch]
    # The undisturbed run.
    whole, _ = read_with_processes(plain.batches, 1, None, len(expected))
    assert all(is_equal(a, b) for a, b in zip(whole, expected, strict=True))
    # The run that is stopped after any number of batches, by other processes and workers each time.
    batches: list[Batch] = []
    position = None
    while len(batches) < len(expected):
        count = int(rng.choice(plain.counts))
        number = int(rng.integers(1, len(expected) - len(batches) + 1))
        source = sources[int(rng.integers(len(sources)))]
        assert source is not None
        part, position = read_with_processes(source.batches, count, position, number)
        batches += part
        assert len(json.dumps(position)) < 1000
    assert all(is_equal(a, b) for a, b in zip(batches, expected, strict=True))
    # What is known before it is read: the shapes, and which processes cannot share a batch.
    known = [plain.batches.read(0), *(b for _, b in plain.batches.iter_known_batches((0, 1)))]
    assert find_shapes(known) == find_shapes(plain.batches)
    for count in {2, 4}.difference(plain.counts):
        with pytest.raises(ConfigurationError, match="cannot have an equal part"):
            next(plain.batches.iter_epoch(0, seed=0, process=(0, count)))


@pytest.mark.parametrize("seed", range(40))
def test_random_pipelines_are_their_plain_definition_however_they_are_read(
    tmp_path: Path, seed: int
):
    check_pipeline(seed, tmp_path, {}, {"threads": 3})


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.full if seed == 40 else pytest.mark.slow)
        for seed in range(40, 240, 20)
    ],
)
def test_more_random_pipelines_are_their_plain_definition(tmp_path: Path, seed: int):
    for number in range(seed, seed + 20):
        check_pipeline(number, tmp_path, {}, {"threads": 3})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 512))
def test_random_pipelines_are_the_same_in_worker_processes(tmp_path: Path, seed: int):
    check_pipeline(seed, tmp_path, {}, {"processes": 2})
