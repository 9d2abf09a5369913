"""Random pipelines against their plain definition: read in batches, by several processes, by
workers, and stopped and resumed at any batch with other processes and workers."""

import json
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.plugins import BatchIterator
from fulgurite_data import Batches
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


def define_batches(examples: list[Any], size: int, remainder: str) -> list[np.ndarray]:
    rows = np.array([example["x"] for example in examples])
    batches = [rows[low : low + size] for low in range(0, len(rows), size)]
    return [batch for batch in batches if len(batch) == size or remainder != "drop"]


def read_item(batch: Any) -> np.ndarray:
    """Return the real examples of a batch."""
    return batch.value["x"][batch.mask] if isinstance(batch, fg.Batch) else batch["x"]


def read_with_processes(
    batches: Batches, count: int, position: Any, num_batches: int
) -> tuple[list[np.ndarray], Any]:
    """Return the next batches, put together from the parts of all processes, and the position after
    them, which is the same for each process."""
    parts, positions = [], []
    for index in range(count):
        with BatchIterator(batches, seed=0, position=position, process=(index, count)) as iterator:
            items = [next(iterator) for _ in range(num_batches)]
        parts.append([read_item(item.batch) for item in items])
        positions.append(items[-1].position)
    assert all(other == positions[0] for other in positions)
    joined = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return joined, json.loads(json.dumps(positions[0]))


def check_pipeline(seed: int, folder: Path, *worker_options: dict[str, int]) -> None:
    rng = np.random.default_rng(1000 + seed)
    size = int(rng.choice([2, 4, 8]))
    remainder = str(rng.choice(["drop", "pad"]))
    pipelines = [make_pipeline(seed, folder, options) for options in worker_options]
    examples = pipelines[0].epochs
    expected = [batch for epoch in examples for batch in define_batches(epoch, size, remainder)]
    if not expected:
        return
    sources = [p.dataset.batch(size, remainder=remainder) for p in pipelines]  # type: ignore[arg-type]
    print(pipelines[0].text, size, remainder)
    # The undisturbed run.
    whole, _ = read_with_processes(sources[0], 1, None, len(expected))
    assert len(whole) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(whole, expected, strict=True))
    # The run that is stopped after any number of batches, by other processes and workers each time.
    batches: list[np.ndarray] = []
    position = None
    while len(batches) < len(expected):
        count = int(rng.choice([n for n in (1, 2, 4) if size % n == 0]))
        number = int(rng.integers(1, len(expected) - len(batches) + 1))
        source = sources[int(rng.integers(len(sources)))]
        part, position = read_with_processes(source, count, position, number)
        batches += part
        assert len(json.dumps(position)) < 1000
    assert all(np.array_equal(a, b) for a, b in zip(batches, expected, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_random_pipelines_are_their_plain_definition_however_they_are_read(
    tmp_path: Path, seed: int
):
    check_pipeline(seed, tmp_path, {}, {"threads": 3})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40, 240, 20))
def test_more_random_pipelines_are_their_plain_definition(tmp_path: Path, seed: int):
    for number in range(seed, seed + 20):
        check_pipeline(number, tmp_path, {}, {"threads": 3})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 512))
def test_random_pipelines_are_the_same_in_worker_processes(tmp_path: Path, seed: int):
    check_pipeline(seed, tmp_path, {}, {"processes": 2})
