"""Datasets of no example, of one, without an end, and in the other byte order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Arrays, Dataset, Items, mix


def count_to(length: int) -> Dataset:
    return Arrays({"x": np.arange(length)})


def read_order(dataset: Dataset, epoch: int = 0) -> list[int]:
    return [int(example["x"]) for example in dataset.iter_examples(epoch=epoch)]


def is_three_times(example: Any) -> bool:
    return example["x"] % 3 == 0


def add_noise(example: Any, rng: np.random.Generator) -> Any:
    return {"x": example["x"] + rng.integers(1000)}


def test_a_part_of_an_endless_repetition_has_another_order_in_each_epoch():
    part = count_to(5).shuffle().repeat().take(12)
    epochs = [read_order(part, epoch=epoch) for epoch in range(3)]
    assert epochs[0][:5] == read_order(count_to(5).shuffle())
    assert len({tuple(order) for order in epochs}) == 3
    assert all(sorted(order[:10]) == sorted([*range(5)] * 2) for order in epochs)


def test_batches_of_an_endless_repetition_are_endless():
    batches = count_to(5).shuffle().repeat().batch(2)
    assert len(batches) == len(count_to(5).batch(2).repeat())
    for build, message in (
        (lambda: batches.shuffle(), r"put repeat\(\) after shuffle\(\)"),
        (lambda: batches.repeat(), "never ends already"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            build()


def test_arrays_in_the_other_byte_order_are_those_of_this_machine(tmp_path: Path):
    big = np.arange(6, dtype=">f4")
    np.save(tmp_path / "big.npy", big)
    for array in (big, np.load(tmp_path / "big.npy", mmap_mode="r")):
        mixed = mix([Arrays({"x": array}), Arrays({"x": big.astype(np.float32)})])
        batch = mixed.batch(4).read(0)
        assert (batch["x"].tolist(), batch["x"].dtype.isnative) == ([0, 0, 1, 1], True)
    items = Items([{"x": row} for row in big]).batch(3).map(lambda b: {"x": b["x"].astype(">f4")})
    assert items.read(1)["x"].dtype.isnative
    assert items.read(1)["x"].tolist() == [3, 4, 5]


def halve(example: Any) -> Any:
    return {"x": example["x"] // 2}


@pytest.mark.parametrize(
    "build",
    [
        lambda d: d.shuffle(),
        lambda d: d.map(halve),
        lambda d: d.take(5),
        lambda d: d.skip(0),
        lambda d: d.shard(0, 1),
        lambda d: d.shuffle(seed=1, reshuffle=False).map(add_noise, rng=True),
    ],
)
def test_stages_of_no_example_have_none_and_of_one_have_that(build: Any):
    empty = build(count_to(0))
    assert (len(empty), [*empty.iter_examples()]) == (0, [])
    with pytest.raises(DataError, match="0 examples do not fill a batch"):
        empty.batch(4)
    for make in (lambda d: d.filter(is_three_times), lambda d: d.pack(4), lambda d: d.window(1)):
        with pytest.raises((DataError, ConfigurationError)):
            make(empty)
    with pytest.raises(ConfigurationError, match="there are no examples"):
        empty.repeat()
    single = build(count_to(1))
    assert [batch["x"].shape for batch in single.batch(4)] == [(1,)]
    (padded,) = single.batch(4, remainder="pad")
    assert padded.mask.tolist() == [True, False, False, False]
    with pytest.raises(DataError, match="1 examples do not fill a batch of 4"):
        single.batch(4, remainder="drop")
    assert len([*single.repeat(3).batch(2)]) == 2
