"""Random orders that take no memory: permutations, and as random as NumPy's."""

import tracemalloc

import numpy as np
import pytest
from fulgurite_data import Arrays
from fulgurite_data.permutation import permute
from scipy import stats


@pytest.mark.parametrize("length", [1, 2, 3, 64, 4096, 4097, 10_000, 2**17 - 1, 2**17, 2**17 + 1])
@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_every_number_comes_once(length: int, key: int):
    order = permute(np.arange(length), length, key)
    assert np.array_equal(np.sort(order), np.arange(length))


@pytest.mark.parametrize("length", [10**6, 10**9, 10**11, 2**61])
def test_large_orders_stay_in_range_and_repeat_nothing(length: int):
    first = permute(np.arange(20_000), length, key=5)
    last = permute(np.arange(length - 20_000, length), length, key=5)
    numbers = np.concatenate([first, last])
    assert len(np.unique(numbers)) == 40_000
    assert 0 <= numbers.min() <= numbers.max() < length
    # Uniform over the range, and not in the order of the places.
    assert stats.kstest(numbers / length, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(np.arange(20_000), first)[0, 1]) < 0.03


def test_any_part_of_an_order_is_that_of_the_whole():
    whole = permute(np.arange(10_000), 10_000, key=3)
    places = np.array([9_999, 0, 17, 5_000])
    assert permute(places, 10_000, key=3).tolist() == whole[places].tolist()


def test_orders_of_several_keys_are_independent():
    length, num_keys = 5_000, 200
    orders = np.array([permute(np.arange(length), length, key) for key in range(num_keys)])
    # Where each key puts the same place is uniform, and neighbours are no neighbours any more.
    for place in (0, 1, length // 2, length - 1):
        assert stats.kstest(orders[:, place] / length, "uniform").pvalue > 1e-3
    steps = np.diff(orders, axis=1) % length
    counts = np.histogram(steps, bins=50, range=(0, length))[0]
    assert stats.chisquare(counts).pvalue > 1e-3
    fixed = (orders == np.arange(length)).sum()  # Poisson with one expected in each order
    assert stats.poisson.cdf(fixed, num_keys) > 1e-4
    assert stats.poisson.sf(fixed, num_keys) > 1e-4


def test_the_first_batch_of_a_thousand_million_examples_takes_no_memory():
    class Far:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> int:
            return index

    from fulgurite_data import Items

    batches = Items(Far()).shuffle().batch(32)
    batches.read(0)
    tracemalloc.start()
    batches.read(10**7)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_the_order_of_a_dataset_is_the_same_however_it_is_read():
    dataset = Arrays({"x": np.arange(30_000)}).shuffle()
    in_order = np.concatenate([batch["x"] for batch in dataset.batch(1_000)])
    assert np.array_equal(in_order, dataset.read(np.arange(30_000))["x"])
    places = np.array([20_000, 8_191, 8_192, 3])
    assert np.array_equal(in_order[places], dataset.read(places)["x"])
