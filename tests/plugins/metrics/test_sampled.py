"""Samples that depend on ids and keys alone, and the median of them."""

from functools import reduce
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_metrics import Median, SampledObjects, SampledSet

MERGE = jax.jit(lambda a, b: a.merge(b))
OF = jax.jit(SampledSet.from_values, static_argnames="size")
MEDIAN = jax.jit(Median.from_values, static_argnames="size")


def sample(metric: Any) -> list[int]:
    values = jax.tree.map(np.asarray, metric).compute()
    assert all(
        not leaf[values["count"] :].any() for name, leaf in values.items() if name != "count"
    )
    return values["values"][: values["count"]].tolist()


def test_smallest_priorities_are_kept_in_any_order_and_grouping() -> None:
    def make_set(letter: str, priority: float) -> SampledSet:
        values = jnp.array([ord(letter), 0, 0])
        return SampledSet(jnp.int32(1), jnp.array([priority, 0, 0]), values + 1000, values)

    parts = [
        make_set(*pair) for pair in (("a", 0.1), ("b", 0.5), ("c", 0.9), ("d", 0.2), ("e", 0.3))
    ]
    for order in permutations(parts):
        left = reduce(MERGE, order)
        right = MERGE(reduce(MERGE, order[:2]), reduce(MERGE, order[2:]))
        for both in (left, right):
            assert "".join(map(chr, sample(both))) == "ade"


def test_of_equal_priorities_the_smaller_id_is_kept() -> None:
    parts = [
        SampledSet(jnp.int32(1), jnp.zeros(1), jnp.array([id]), jnp.array([id])) for id in (3, 1, 2)
    ]
    assert {sample(reduce(MERGE, order))[0] for order in permutations(parts)} == {1}


@pytest.mark.full
def test_sample_of_objects_on_the_host_is_that_of_the_same_ids_B6() -> None:
    ids = np.random.default_rng(0).permutation(12)
    key = jax.random.key(7)
    on_device = SampledSet.from_values(10 * ids, ids, size=5, key=key)
    parts = [
        SampledObjects.from_values([f"text {id}" for id in part], part, size=5, key=key)
        for part in np.split(ids, 3)
    ]
    expected = [f"text {value // 10}" for value in sample(on_device)]
    for order in permutations(parts):
        assert reduce(SampledObjects.merge, order).compute() == expected
    again = SampledObjects.from_values(["other", "other"], [ids[0], ids[0]], size=5, key=key)
    assert len(again.compute()) == 1  # an id stands for one object
    with pytest.raises(ConfigurationError, match="2 values and 1 ids"):
        SampledObjects.from_values(["a", "b"], [1], size=2)


@pytest.mark.full
def test_samples_are_added_to_and_those_of_objects_say_what_they_hold() -> None:
    ids = np.random.default_rng(1).permutation(12)
    for key in (jax.random.key(7), None):
        order = jax.random.key(0) if key is None else key
        priority = [int(jax.random.bits(jax.random.fold_in(order, int(id)))) for id in ids]
        expected = ids[np.argsort(priority)[:5]].tolist()
        on_device = SampledSet.from_values(10 * ids[:4], ids[:4], size=5, key=key)
        mask = np.asarray([True] * 8 + [False])
        more = np.append(ids[4:], 99)
        assert sample(on_device.add(10 * more, more, mask, key=key)) == [10 * id for id in expected]
        objects = SampledObjects.from_values([], [], size=5, key=key)
        assert len(objects) == 0 and "0" not in objects
        for number, id in enumerate(ids.tolist(), 1):
            objects = objects.add([str(id)], [id])
            assert len(objects) == min(number, 5)
        assert list(objects) == objects.compute() == [str(id) for id in expected]
        assert [str(id) in objects for id in range(13)] == [id in expected for id in range(13)]


@pytest.mark.full
def test_ids_of_64_bits_stay_exact_on_the_host_and_are_refused_on_the_device() -> None:
    # Multiples of 2**32 differ in their high words alone.
    ids = np.arange(200, dtype=np.int64) << 32
    sample = SampledObjects.from_values([str(id) for id in ids], ids, size=200)
    assert sorted(sample.compute(), key=int) == [str(id) for id in ids]
    assert [id for _, id, _ in sample.entries] == list(map(int, sample.compute()))
    # It is a random sample, and not the one of the smallest ids.
    some = SampledObjects.from_values(ids.tolist(), ids, size=50).compute()
    assert 60 < np.mean(np.asarray(some) >> 32) < 140
    for wide in (ids[1:3], np.asarray([-(2**31) - 1])):
        with pytest.raises(DataError, match=r"data\['ids'\] holds .* outside the range of int32"):
            SampledSet.from_values(np.zeros(len(wide)), wide, size=2)
    # With x64 the device holds them, and samples as the host does.
    wide = np.arange(40) * 2**32 + np.arange(40) % 3
    with jax.enable_x64(True):
        on_device = SampledSet.from_values(np.arange(40), wide, size=8)
        on_host = SampledObjects.from_values(range(40), wide, size=8)
        assert on_device.values.tolist() == on_host.compute()
    with pytest.raises(ConfigurationError, match="ids that are not integers"):
        SampledObjects.from_values(["a", "b"], np.array([0.2, 0.7]), size=2)
    with pytest.raises(ConfigurationError, match="it must have 64 bits"):
        SampledObjects.from_values(["a"], [2**64], size=1)
    edges = [-(2**63), -(2**31), -1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]
    assert sorted(SampledObjects.from_values(edges, edges, size=9).compute()) == edges
    # Of ids of 32 bits the priority is that of the id alone, negative ones included.
    small = np.asarray([-5, 3, 2**31 - 1], np.int32)
    drawn = [jax.random.bits(jax.random.fold_in(jax.random.key(0), id)) for id in small]
    entries = SampledObjects.from_values(small.tolist(), small, size=3).entries
    assert {id: priority for priority, id, _ in entries} == dict(
        zip(small.tolist(), map(int, drawn), strict=True)
    )


@pytest.mark.full
def test_batches_and_masks_do_not_change_the_sample() -> None:
    ids = np.random.default_rng(0).permutation(24)
    key = jax.random.key(7)
    priority = np.array([jax.random.bits(jax.random.fold_in(key, int(id))) for id in ids])
    expected = ids[np.argsort(priority)[:5]].tolist()
    whole = SampledSet.from_values(10 * ids, ids, size=5, key=key)
    assert sample(whole) == [10 * id for id in expected]
    mask = np.array([True] * 8 + [False] * 4)
    parts = [
        OF(np.append(10 * part, [99] * 4), np.append(part, [0, 1, 2, 3]), mask, size=5, key=key)
        for part in np.split(ids, 3)
    ]
    for order in permutations(parts):
        merged = reduce(MERGE, order)
        assert all(map(np.array_equal, jax.tree.leaves(merged), jax.tree.leaves(whole)))
    assert sample(MERGE(whole, whole)) == sample(whole), "an example is not taken twice"
    assert sample(OF(10 * ids, ids, size=5)) != sample(whole)


@pytest.mark.full
def test_fewer_examples_than_the_sample_size() -> None:
    values = {
        "image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
        "score": np.array([0.5, np.nan, 2], np.float16),
    }
    sampled = SampledSet.from_values(
        values, np.arange(3), np.array([True, False, True]), size=4
    ).compute()
    assert (
        sampled["count"] == 2
        and sampled["image"].shape == (4, 2, 2)
        and sampled["image"].dtype == np.uint8
    )
    assert np.sort(sampled["score"]).tolist() == [0, 0, 0.5, 2]
    assert (
        sample(SampledSet.from_values(np.arange(3), np.arange(3), np.zeros(3, bool), size=2)) == []
    )
    assert sample(SampledSet.from_values(np.zeros(0), np.zeros(0, int), size=2)) == []


@pytest.mark.full
def test_every_example_is_equally_likely() -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    ids = jnp.arange(8)
    sampled_ids = jax.jit(
        jax.vmap(lambda key: SampledSet.from_values(ids, ids, size=3, key=key).ids)
    )(keys)
    shares = np.bincount(np.asarray(sampled_ids).ravel(), minlength=8) / 4000
    np.testing.assert_allclose(shares, 3 / 8, atol=4 * np.sqrt(3 / 8 * 5 / 8 / 4000))
    pairs = np.mean((sampled_ids == 0).any(1) & (sampled_ids == 1).any(1))
    assert pairs == pytest.approx(3 / 8 * 2 / 7, abs=4 * np.sqrt(0.107 * 0.893 / 4000))


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
def test_median_of_few_values_is_exact(n: int) -> None:
    random = np.random.default_rng(n)
    values = np.round(random.normal(size=n), 1).astype("f4")
    parts = [MEDIAN(np.full(8, np.nan, "f4"), jax.random.key(100), np.zeros(8, bool), size=40)]
    for index, start in enumerate(range(0, n, 7)):
        part = np.full(8, np.nan, "f4")
        part[: len(values[start : start + 7])] = values[start : start + 7]
        parts.append(
            MEDIAN(
                part, jax.random.key(index), np.arange(8) < len(values[start : start + 7]), size=40
            )
        )
    merged = reduce(MERGE, parts[::-1])
    on_host = jax.tree.map(np.asarray, merged).compute()
    assert isinstance(on_host, np.ndarray) and on_host.dtype == np.float32
    np.testing.assert_array_equal(on_host, np.float32(np.median(values)) if n else np.nan)
    np.testing.assert_array_equal(jax.jit(lambda metric: metric.compute())(merged), on_host)


@pytest.mark.full
def test_median_of_many_or_repeated_values_is_close() -> None:
    values = np.random.default_rng(0).exponential(size=20_000).astype("f4")
    parts = [
        MEDIAN(part, jax.random.key(i), size=1000) for i, part in enumerate(np.split(values, 20))
    ]
    below = np.mean(values < float(reduce(MERGE, parts).compute()))
    assert abs(below - 0.5) < 4 * 0.5 / np.sqrt(1000)
    mostly = np.where(np.arange(20_000) % 10 < 7, np.float32(0), values)
    parts = [
        MEDIAN(part, jax.random.key(i), size=1000) for i, part in enumerate(np.split(mostly, 20))
    ]
    assert reduce(MERGE, parts).compute() == 0


@pytest.mark.full
def test_infinite_numbers_have_a_median() -> None:
    infinity = np.float32(np.inf)
    assert (
        Median.from_values(np.array([-infinity, 1, infinity]), jax.random.key(0), size=8).compute()
        == 1
    )
    assert (
        Median.from_values(np.array([1, infinity, infinity]), jax.random.key(0), size=8).compute()
        == infinity
    )
    assert np.isnan(
        jax.tree.map(
            np.asarray,
            Median.from_values(np.array([-infinity, infinity]), jax.random.key(0), size=8),
        ).compute()
    )
