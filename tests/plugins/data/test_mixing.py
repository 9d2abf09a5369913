"""Mixtures and pairs of datasets, against orders written out by hand."""

from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Arrays, Dataset, mix, zip_datasets
from fulgurite_testing import check_source


def count_from(start: int, length: int) -> Dataset:
    return Arrays(np.arange(start, start + length))


def as_any(value: Any) -> Any:
    """Return a value of which the type checker is to know nothing."""
    return value


def read_all(dataset: Dataset, epoch: int = 0) -> list[int]:
    return [int(example) for example in dataset.iter_examples(epoch=epoch)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([3, 1], [0, 1, 2, 100, 3, 4, 5, 101, 6, 7, 8, 102, 9]),
        ([0.7, 0.3], [0, 1, 2, 100, 3, 4, 101, 5, 6, 102, 7, 8, 9, 103]),
        ([1, 1], [n for pair in zip(range(10), range(100, 110), strict=True) for n in pair]),
    ],
)
def test_a_mixture_has_its_proportions_from_the_first_example_on(weights: Any, expected: Any):
    mixed = mix([count_from(0, 10), count_from(100, 10)], weights)
    assert read_all(mixed) == expected
    assert len(mixed) == len(expected)
    order = np.random.default_rng(0).permutation(len(expected))
    assert mixed.read(order).tolist() == np.array(expected)[order].tolist()


def test_a_pass_ends_with_the_first_source_that_does_or_restarts_it():
    sources = {"a": count_from(0, 10), "b": count_from(100, 10), "c": count_from(200, 3)}
    weights = {"c": 1, "a": 2, "b": 1}
    first = [0, 100, 1, 200, 2, 101, 3, 201, 4, 102, 5, 202, 6, 103, 7]
    assert read_all(mix(sources, weights)) == first
    restarted = read_all(mix(sources, weights, exhausted="restart"))
    assert restarted[:16] == [*first, 200]
    # Until each was read to its end: b has every fourth place, its last example the 38th.
    assert restarted[-1] == 109
    assert len(restarted) == 38
    assert restarted[::2] == [n % 10 for n in range(19)]


def count_by_hand(sizes: list[int], weights: list[int]) -> int:
    """Return how many places there are before one whose source is used up, place by place."""
    used, place = [0] * len(sizes), 0
    while True:
        # The first source has the ceiling of its share, the others what is left, by the same rule.
        left, total, shares = place + 1, sum(weights), []
        for weight in weights[:-1]:
            shares.append(-(-left * weight // total))
            left -= shares[-1]
            total -= weight
        used = [*shares, left]
        if any(count > size for count, size in zip(used, sizes, strict=True)):
            return place
        place += 1


def test_a_pass_ends_before_the_first_example_that_is_not_there():
    assert len(mix([count_from(0, 1000)] * 3, [1, 2, 7])) == 1429
    assert len(mix([count_from(0, 22), count_from(0, 4)], [3, 4])) == 8
    rng = np.random.default_rng(0)
    for _ in range(60):
        number = int(rng.integers(2, 5))
        sizes, weights = (rng.integers(1, top, number).tolist() for top in (30, 9))
        divisor = int(np.gcd.reduce(weights))
        weights = [weight // divisor for weight in weights]
        mixed = mix([count_from(0, size) for size in sizes], weights)
        assert len(mixed) == count_by_hand(sizes, weights)
        assert mixed.read(np.arange(len(mixed))).shape == (len(mixed),)


def test_sources_that_restart_are_shuffled_again():
    mixed = mix([Arrays(np.arange(4)).shuffle(), count_from(100, 12)], [1, 1], exhausted="restart")
    passes = [np.reshape(read_all(mixed, epoch)[::2], (3, 4)) for epoch in range(2)]
    orders = [tuple(order) for rounds in passes for order in rounds.tolist()]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 3


def test_two_sources_of_one_kind_have_orders_of_their_own():
    shuffled = Arrays(np.arange(50)).shuffle()
    both = read_all(mix([shuffled, shuffled]))
    assert sorted(both[::2]) == sorted(both[1::2]) == [*range(50)]
    assert both[::2] != both[1::2]


def test_a_fixed_order_is_the_same_in_a_mixture_and_below_what_was_planned_over_it():
    fixed = Arrays(np.arange(40)).shuffle(seed=1, reshuffle=False)
    even = fixed.filter(lambda number: number % 2 == 0)
    expected = [number for number in read_all(fixed) if number % 2 == 0]
    assert read_all(even) == expected
    mixed = read_all(mix([even, count_from(100, 20)]), epoch=3)
    assert mixed[::2] == expected


def test_endless_mixtures_nest_and_keep_their_proportions():
    zeros, ones = Arrays(np.zeros(7)).repeat(), Arrays(np.ones(3)).repeat()
    inner = mix([zeros, ones], [4, 1])
    assert inner.read(np.arange(1000)).sum() == 200
    outer = mix([inner, ones])
    assert outer.read(np.arange(1000)).sum() == 600
    # Of the mixture's own half a fifth are ones, however far away one looks.
    assert outer.read(np.arange(10**12, 10**12 + 1000)).sum() == 600


def test_weights_by_step_change_nothing_before_their_step():
    sources = [count_from(0, 100), count_from(100, 100)]
    constant = read_all(mix(sources, [3, 1]))
    schedule = {0: [3, 1], 5: [0, 1], 7: [1, 1]}
    changed = mix(sources, schedule=schedule, batch_size=4)
    numbers = read_all(changed)
    assert numbers[:20] == constant[:20]
    assert numbers[20:28] == [*range(105, 113)]
    assert numbers[28:34] == [15, 113, 16, 114, 17, 115]
    later = mix(sources, schedule={**schedule, 9: [1, 3]}, batch_size=4)
    assert read_all(later)[:36] == numbers[:36]
    assert read_all(later)[36:44] != numbers[36:44]
    # 15 of the first source are gone, and 13 of the second: 85 pairs are left.
    assert len(numbers) == 28 + 2 * 85
    endless = mix(sources, schedule=schedule, batch_size=4, exhausted="restart")
    assert endless.read([10**9]).tolist()[0] in range(200)


def mix_by_hand(sizes: list[int], schedule: dict[int, list[int]], batch_size: int) -> list[int]:
    """Return the examples of a mixture, those of source n from 1000 n on, place by place, until a
    source has no more or all weights have counted for a while."""
    used = [0] * len(sizes)
    numbers: list[int] = []
    starts = [step * batch_size for step in schedule]
    for weights, start, end in zip(
        schedule.values(), starts, [*starts[1:], starts[-1] + 500], strict=True
    ):
        before = [0] * len(sizes)
        for place in range(start, end):
            left, total, shares = place - start + 1, sum(weights), []
            for weight in weights:
                shares.append(-(-left * weight // total) if total else 0)
                left -= shares[-1]
                total -= weight
            (owner,) = [n for n, share in enumerate(shares) if share > before[n]]
            before = shares
            if used[owner] == sizes[owner]:
                return numbers
            numbers.append(1000 * owner + used[owner])
            used[owner] += 1
    return numbers


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_with_weights_of_zero_are_the_rule_place_by_place(seed: int):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(2, 5))
    sizes = rng.integers(1, 60, number).tolist()
    steps = [0, *np.cumsum(rng.integers(1, 4, rng.integers(0, 4))).tolist()]
    schedule = {step: rng.integers(0, 5, number).tolist() for step in steps}
    # All of a step may not be 0, and no source at all steps.
    schedule = {s: w if any(w) else [1] * number for s, w in schedule.items()}
    schedule[0] = [max(weight, 1) for weight in schedule[0]]
    # The rule is of weights in lowest terms.
    lowest = {s: [w // int(np.gcd.reduce(ws)) for w in ws] for s, ws in schedule.items()}
    batch_size = int(rng.integers(1, 6))
    sources = [count_from(1000 * n, size) for n, size in enumerate(sizes)]
    expected = mix_by_hand(sizes, lowest, batch_size)
    if not expected:
        return
    mixed = mix(sources, schedule=schedule, batch_size=batch_size)
    assert read_all(mixed) == expected


def test_parts_of_endless_mixtures_have_other_orders_in_each_epoch():
    left, right = Arrays(np.arange(5)).shuffle(), Arrays(np.arange(100, 105)).shuffle()
    for endless in (
        mix([left.repeat(), right.repeat()]),
        mix([left, right], schedule={0: [1, 1]}, batch_size=1, exhausted="restart"),
        zip_datasets([left.repeat(), right], length="cycle").map(lambda pair: pair[0]),
    ):
        epochs = [tuple(read_all(endless.take(30), epoch)) for epoch in range(4)]
        assert len(set(epochs)) == 4
        assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_every_prefix_of_a_mixture_has_the_counts_of_the_rule():
    rng = np.random.default_rng(0)
    for _ in range(10):
        weights = rng.integers(1, 12, rng.integers(2, 5)).tolist()
        sources = [Arrays(np.full(1000, i)) for i in range(len(weights))]
        owners = mix(sources, weights).read(np.arange(200))
        total = sum(weights)
        for prefix in range(200):
            counts = np.bincount(owners[:prefix], minlength=len(weights))
            exact = np.array(weights) * prefix / total
            assert (np.abs(counts - exact) < len(weights)).all()
            assert counts[0] == -(-prefix * weights[0] // total)


@pytest.mark.parametrize("lengths", [(2_000_003, 3), (1_000_003, 700_001)])
def test_weights_that_are_the_lengths_give_every_example_once(lengths: tuple[int, int]):
    first, second = (np.arange(length) for length in lengths)
    mixed = mix([Arrays(first), Arrays(-1 - second)], lengths)
    numbers = np.sort(mixed.read(np.arange(len(mixed))))
    assert np.array_equal(numbers, np.arange(-lengths[1], lengths[0]))
    restarted = mix([Arrays(first), Arrays(second)], lengths, exhausted="restart")
    assert len(restarted) == sum(lengths)


def test_lengths_whose_products_are_beyond_64_bits_are_exact_weights():
    lengths = (2**40 + 1, 2**33 + 5)
    sources = [
        Arrays(np.broadcast_to(np.int8(number), length)) for number, length in enumerate(lengths)
    ]
    mixed = mix(sources, lengths)
    assert len(mixed) == sum(lengths)
    # Of the first m places, the first source has m * its length / the sum, rounded up.
    for low in (0, 2**39, len(mixed) - 64):
        places = range(low, low + 64)
        counts = [-(-m * lengths[0] // sum(lengths)) for m in (*places, places.stop)]
        expected = [int(after == before) for before, after in pairwise(counts)]
        assert mixed.read(places).tolist() == expected


def test_weights_near_the_largest_float_keep_to_their_proportions():
    mixed = mix([count_from(0, 10), count_from(100, 10)], [1e308, 1.5e308])
    assert read_all(mixed)[:10] == [0, 100, 1, 101, 102, 2, 103, 3, 104, 105]


def test_weights_that_are_no_fractions_keep_to_their_proportions():
    weights = [0.123456789, 0.5, 1.7]
    owners = mix([Arrays(np.full(10**6, i)) for i in range(3)], weights).read(np.arange(10**5))
    shares = np.bincount(owners) / 10**5
    assert shares == pytest.approx(np.array(weights) / sum(weights), abs=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda a, b: mix({"web": a, "code": b}, [1, 0]), r"weight of source 1 \(code\) is 0"),
        (lambda a, b: mix([a, b], [1, -1]), r"weight of source 1 \(1\) is -1"),
        (lambda a, b: mix([a, b], [1, np.inf]), r"source 1 \(1\) is inf; it must be a finite"),
        (lambda a, b: mix([a, b], [np.nan, 1]), r"source 0 \(0\) is nan; it must be a finite"),
        (lambda a, b: mix([a, b], [1]), "1 weights and 2 sources"),
        (lambda a, b: mix({"web": a}, {"code": 1}), "weights are for 'code'.*sources are 'web'"),
        (
            lambda a, b: mix([a, b], as_any({0: 3, 1: 1})),
            r"weights are for 0, 1.*in order, \[3, 1\]",
        ),
        (
            lambda a, b: mix(as_any({1: a, "1": b})),
            "the name of source 0 is 1; it must be a string",
        ),
        (lambda a, b: mix({"web": a, "none": a.skip(9)}), r"source 1 \(none\) is empty"),
        (lambda a, b: mix([]), "no sources"),
        (lambda a, b: mix([a, b], schedule={1: [1, 1]}, batch_size=2), "must rise from 0"),
        (lambda a, b: mix([a, b], schedule={0: [1, 1]}), "mix: batch_size"),
        (lambda a, b: mix([a, b], schedule={0: [1, 0]}, batch_size=2), "0 at all steps"),
        (lambda a, b: mix([a, b], [1, 1], schedule={0: [1, 1]}), "not both"),
        (
            lambda a, b: mix([a, b], schedule={0: [1, 1], 3: [0, 0]}, batch_size=2),
            "mix, from step 3 on: all weights are 0",
        ),
        (lambda a, b: mix([a.batch(2)]), r"source 0 \(0\) is a Batches"),
        (lambda a, b: zip_datasets([a, b]), "several lengths: 0 has 9, 1 has 4"),
        (lambda a, b: zip_datasets({"a": a.take(1).skip(1)}), "is empty"),
        (lambda a, b: zip_datasets(as_any({0: a})), "name of source 0 is 0"),
    ],
)
def test_what_cannot_be_mixed_is_refused_at_once(build: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        build(count_from(0, 9), count_from(100, 4))


def test_examples_of_several_structures_are_refused_with_both():
    with pytest.raises(DataError, match="several structures.*'x'.*'y'"):
        mix([Arrays({"x": np.arange(4)}), Arrays({"y": np.arange(4)})])


def test_sources_of_several_dtypes_are_refused_before_a_batch_is_read():
    bytes_, floats = np.full(300, 200, np.uint8), np.zeros(20, np.float32)
    with pytest.raises(
        DataError, match=r"mix: data\['x'\] is uint8 in source a, and float32 in .*b"
    ):
        mix({"a": Arrays({"x": bytes_}), "b": Arrays({"x": floats})}, [15, 1])

    def convert(example: Any) -> Any:
        return {"x": np.float32(example["x"])}

    mixed = mix([Arrays({"x": bytes_}).map(convert), Arrays({"x": floats})], [15, 1])
    batches = [*mixed.batch(4)]
    assert {batch["x"].dtype for batch in batches} == {np.dtype(np.float32)}
    assert batches[0]["x"].tolist() == [200] * 4
    assert batches[3]["x"].tolist() == [200, 200, 200, 0]
    # Strings of other lengths, and lists without a number, are of one kind.
    strings = mix([Arrays(np.array(["a", "bcd"])), Arrays(np.array(["ef", "g"]))])
    assert strings.read([0, 1, 2]).tolist() == ["a", "ef", "bcd"]


def test_a_schedule_is_refused_for_batches_of_another_size():
    mixed = mix([count_from(0, 9), count_from(0, 9)], schedule={0: [1, 1]}, batch_size=4)
    assert mixed.batch(4).read(0).tolist() == [0, 0, 1, 1]
    pairs = zip_datasets([mixed, count_from(0, 18)])
    for dataset in (mixed, mixed.map(lambda number: number), mixed.take(12), pairs.take(16)):
        assert len(dataset.batch(4, remainder="drop").read(0))
        with pytest.raises(ConfigurationError, match=r"size is 8, and mix.*batch_size=4"):
            dataset.batch(8)
    assert len(mixed.skip(2).batch(8)) == 2
    other = mix([count_from(0, 9), count_from(0, 9)], schedule={0: [1, 1]}, batch_size=2)
    with pytest.raises(ConfigurationError, match="batches of 2 and 4: give mix.. one batch_size"):
        zip_datasets([mixed, other])


def test_an_error_in_a_mixture_names_source_and_example():
    def fail(example: Any) -> Any:
        if example == 2:
            raise ValueError("broken")
        return example

    mixed = mix({"good": count_from(0, 9), "bad": count_from(0, 9).map(fail)})
    with pytest.raises(ValueError, match="broken") as caught:
        mixed.batch(4).read(1)
    assert caught.value.__notes__[0] == "in map(fail), of example 2 of Arrays"
    with pytest.raises(ValueError, match="broken") as caught:
        mix({"a": count_from(0, 9), "b": count_from(0, 9)}).map(fail).batch(4).read(1)
    assert caught.value.__notes__[0] == "in map(fail), of example 2 of Arrays (a)"


def test_pairs_end_with_the_shortest_or_begin_shorter_sources_again():
    sources = {"a": count_from(0, 5), "b": count_from(10, 2)}
    shortest = zip_datasets(sources, length="min")
    assert [(int(e["a"]), int(e["b"])) for e in shortest.iter_examples()] == [(0, 10), (1, 11)]
    cycle = zip_datasets(sources, length="cycle")
    pairs = [(int(e["a"]), int(e["b"])) for e in cycle.iter_examples()]
    assert pairs == [(0, 10), (1, 11), (2, 10), (3, 11), (4, 10)]
    first = next(islice(zip_datasets([*sources.values()], length="min").iter_examples(), 1))
    assert isinstance(first, tuple)
    assert tuple(map(int, first)) == (0, 10)


def test_mixtures_and_pairs_resume_at_every_position():
    def build_source() -> Any:
        left = Arrays({"x": np.arange(11)}).shuffle()
        right = Arrays({"x": np.arange(100, 104)}).shuffle()
        mixed = mix([left, right], [2, 1], exhausted="restart")
        return zip_datasets([mixed, mixed.shuffle()]).batch(2)

    check_source(build_source)
