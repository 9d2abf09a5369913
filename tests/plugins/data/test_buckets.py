"""Batches by length, against a plain definition."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Dataset, Items
from fulgurite_testing import check_source


def make_items(lengths: list[int]) -> Dataset:
    return Items([{"x": np.full(n, i), "id": i} for i, n in enumerate(lengths)])


def bucket_by_hand(lengths: list[int], sizes: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Return the length of each batch and its examples, as a stream would complete them."""
    waiting: dict[int, list[int]] = {length: [] for length in sizes}
    batches = []
    for index, n in enumerate(lengths):
        length = min(length for length in sizes if length >= n)
        waiting[length].append(index)
        if len(waiting[length]) == sizes[length]:
            batches.append((length, waiting[length]))
            waiting[length] = []
    partial = [(length, part) for length, part in waiting.items() if part]
    return batches + sorted(partial, key=lambda batch: batch[1][-1])


def test_examples_are_in_batches_of_their_length_as_a_stream_completes_them():
    rng = np.random.default_rng(0)
    for sizes in ({2: 3, 5: 2, 8: 4}, {8: 5}):
        lengths = rng.integers(0, 9, 40).tolist()
        batches = make_items(lengths).bucket(sizes)
        expected = bucket_by_hand(lengths, sizes)
        assert len(batches) == len(expected)
        for batch, (length, members) in zip(batches, expected, strict=True):
            assert batch["x"].shape == batch["mask"].shape == (len(members), length)
            assert batch["id"].tolist() == members
            assert batch["mask"].sum(1).tolist() == [lengths[i] for i in members]
            assert (batch["x"] == batch["mask"] * batch["id"][:, None]).all()


def test_incomplete_batches_are_dropped_or_padded():
    items = make_items([1, 3, 1, 3, 1])
    dropped = items.bucket((1, 3), 2, remainder="drop")
    assert [batch["id"].tolist() for batch in dropped] == [[0, 2], [1, 3]]
    assert not dropped.has_unequal_batches()
    padded = items.bucket((1, 3), 2, remainder="pad")
    *_, last = padded
    assert last.mask.tolist() == [True, False]
    assert last.value["id"].tolist() == [4, 0]
    parts = [[*padded.iter_epoch(0, seed=0, process=(i, 2))][-1] for i in range(2)]
    assert [part.mask.tolist() for part in parts] == [[True], [False]]
    assert padded.has_padding()


def test_batches_of_each_shape_are_known_before_they_are_read():
    items = make_items([1, 3, 1, 3, 1])
    batches = items.bucket((1, 3), 2)
    assert batches.has_unequal_batches()
    known = dict(batches.iter_known_batches((0, 1)))
    assert {number: batch["x"].shape for number, batch in known.items()} == {1: (2, 3), 2: (1, 1)}
    with pytest.raises(ConfigurationError, match="cannot have an equal part"):
        next(batches.iter_epoch(0, seed=0, process=(0, 2)))


def test_buckets_resume_at_every_position_shuffled_or_not():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 6, 17).tolist()
    check_source(lambda: make_items(lengths).bucket((2, 5), 3))
    check_source(lambda: make_items(lengths).bucket((2, 5), 3).shuffle())
    batches = make_items(lengths).bucket((2, 5), 3).shuffle()
    epochs = [[b["id"].tolist() for b in batches.iter_epoch(e, seed=0)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert all(first != second for first, second in pairwise(epochs))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda d: d.bucket((2,), 2), DataError, "example 1 of list has 3 elements"),
        (lambda d: d.bucket((9,), 9, remainder="drop"), DataError, "no bucket has a full batch"),
        (lambda d: d.bucket((4, 2), 2), ConfigurationError, "must rise"),
        (lambda d: d.bucket((2, 2), 2), ConfigurationError, "are equal"),
        (lambda d: d.bucket((2, 4)), ConfigurationError, "positive integers"),
        (lambda d: d.bucket({True: 2, 4: 2}), ConfigurationError, "positive integers"),
        (lambda d: d.bucket({4: 2}, 2), ConfigurationError, "leave batch_size out"),
        (lambda d: d.shuffle().bucket((4,), 2), ConfigurationError, "shuffle\\(\\) the batches"),
    ],
)
def test_what_makes_no_buckets_is_refused(build: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        build(make_items([1, 3, 1]))


def test_lengths_and_sizes_may_be_integers_of_numpy():
    items = make_items([1, 3, 1])
    plain = [batch["id"].tolist() for batch in items.bucket({1: 2, 3: 1})]
    lengths: Any = np.array([1, 3])
    sizes: Any = np.array([2, 1])
    assert [b["id"].tolist() for b in items.bucket(dict(zip(lengths, sizes, strict=True)))] == plain
    assert items.bucket(lengths, sizes[0]).node.stages == items.bucket((1, 3), 2).node.stages


def test_an_array_that_does_not_count_is_never_cut_unless_asked_for():
    items = [{"x": np.arange(3), "y": np.arange(2)}, {"x": np.arange(2), "y": np.arange(6)}]
    dataset = Items(items)
    for batches in (dataset.pad(4, length_of="x").batch(2), dataset.bucket([4], 2, length_of="x")):
        with pytest.raises(
            DataError, match=r"data\['y'\] of example 1 of list has 6 elements.*than 4"
        ):
            batches.read(0)
    padded = dataset.pad(6, length_of="x").batch(2).read(0)
    assert padded["y"].tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]]
    cut = dataset.pad(4, truncate=True, length_of="x").batch(2).read(0)
    assert cut["y"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert cut["mask"].sum(1).tolist() == [3, 2]
