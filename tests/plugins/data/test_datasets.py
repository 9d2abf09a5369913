"""Datasets against plain definitions: which examples there are, in which order, in which batches."""

from itertools import chain
from typing import Any, Literal

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import SeekableSource
from fulgurite_data import Arrays, Batches, Dataset, Items, Ragged


def count_to(length: int) -> Dataset:
    return Arrays({"x": np.arange(length)})


def read_batches(batches: Batches, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches.iter_epoch(epoch, seed=seed)]


def read_order(dataset: Dataset, epoch: int = 0, seed: int = 0) -> list[int]:
    return [int(example["x"]) for example in dataset.iter_examples(epoch=epoch, seed=seed)]


def is_three_times(example: Any) -> bool:
    return example["x"] % 3 == 0


def add_noise(example: Any, rng: np.random.Generator) -> Any:
    return {"x": example["x"] + rng.integers(1000)}


def test_shuffled_epochs_are_permutations_that_differ_and_depend_on_the_seed():
    dataset = count_to(20).shuffle()
    first, second = read_order(dataset), read_order(dataset, epoch=1)
    assert sorted(first) == sorted(second) == [*range(20)]
    assert first != second
    assert read_order(count_to(20).shuffle()) == first
    assert read_order(dataset, seed=1) != first
    assert read_order(count_to(20).shuffle(seed=5), seed=1) == read_order(dataset, seed=5)


def test_an_order_without_reshuffling_is_that_of_every_epoch_and_run():
    dataset = count_to(20).shuffle(seed=3, reshuffle=False)
    first = read_order(dataset)
    assert first == read_order(dataset, epoch=4) == read_order(dataset, seed=9)
    assert first != [*range(20)]
    rest = sorted(read_order(dataset.take(15)) + read_order(dataset.skip(15)))
    assert rest == [*range(20)]


def test_batches_of_a_repeated_dataset_cross_the_epoch_and_repeated_batches_do_not():
    crossing = read_batches(count_to(10).shuffle().repeat(2).batch(4))
    orders = [read_order(count_to(10).shuffle(), epoch=epoch) for epoch in range(2)]
    assert [*chain(*crossing)] == orders[0] + orders[1]
    assert [len(batch) for batch in crossing] == [4, 4, 4, 4, 4]
    dropped = read_batches(count_to(10).shuffle().batch(4, remainder="drop").repeat(2))
    assert dropped == [orders[0][:4], orders[0][4:8], orders[1][:4], orders[1][4:8]]


def test_an_epoch_of_a_repetition_begins_where_the_one_before_ended():
    dataset = count_to(6).shuffle()
    twice = dataset.repeat(2)
    expected = read_order(dataset, epoch=2) + read_order(dataset, epoch=3)
    assert read_order(twice, epoch=1) == expected
    endless = dataset.repeat().batch(4).take(3)
    orders = [read_order(dataset, epoch=epoch) for epoch in range(2)]
    assert [*chain(*read_batches(endless))] == orders[0] + orders[1]


def test_take_and_skip_divide_examples_and_batches():
    assert read_order(count_to(10).skip(3).take(4)) == [3, 4, 5, 6]
    assert read_order(count_to(10).take(50)) == [*range(10)]
    assert read_batches(count_to(10).batch(3).skip(1).take(2)) == [[3, 4, 5], [6, 7, 8]]
    with pytest.raises(DataError, match="no batches"):
        count_to(10).batch(5).skip(2)


@pytest.mark.parametrize(
    ("length", "count", "uneven", "even"),
    [
        (10, 3, [(0, 4), (4, 7), (7, 10)], [(0, 3), (3, 6), (6, 9)]),
        (7, 4, [(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_shards_are_contiguous_and_differ_by_one_example_at_most(
    length: int, count: int, uneven: Any, even: Any
):
    dataset = count_to(length)
    remainders: dict[Literal["keep", "drop"], Any] = {"keep": uneven, "drop": even}
    for remainder, expected in remainders.items():
        shards = [dataset.shard(i, count, remainder=remainder) for i in range(count)]
        assert [read_order(shard) for shard in shards] == [[*range(*part)] for part in expected]


def test_more_shards_than_examples_are_an_error_where_each_would_be_empty():
    sizes = [len(count_to(3).shard(index, 4)) for index in range(4)]
    assert sizes == [1, 1, 1, 0]
    with pytest.raises(ConfigurationError, match="3 examples over 4 parts leave none"):
        count_to(3).shard(0, 4, remainder="drop")
    with pytest.raises(DataError, match="0 examples do not fill a batch"):
        count_to(3).shard(3, 4).batch(1)


def test_a_filter_keeps_what_its_predicate_holds_for():
    dataset = count_to(10).filter(is_three_times)
    assert read_order(dataset) == [0, 3, 6, 9]
    batches = dataset.batch(1)
    assert [b["x"].tolist() for b in batches.iter_epoch(0, seed=0, start=2)] == [[6], [9]]
    with pytest.raises(DataError, match="no example is left"):
        count_to(10).filter(lambda example: False)
    with pytest.raises(ConfigurationError, match=r"put filter\(\) before shuffle\(\)"):
        count_to(10).shuffle().filter(is_three_times)


def test_random_maps_follow_from_seed_epoch_and_example():
    dataset = count_to(50).map(add_noise, rng=True)
    first = read_order(dataset)
    assert first == read_order(dataset)
    assert dataset.read([7, 3])["x"].tolist() == [first[7], first[3]]
    noises = [np.subtract(read_order(dataset, epoch=e), range(50)) for e in range(2)]
    assert len(set(noises[0])) > 40
    assert (noises[0] != noises[1]).any()
    assert read_order(dataset, seed=1) != first
    # Two that draw, one after the other, draw different numbers.
    twice = read_order(dataset.map(add_noise, rng=True))
    assert (np.subtract(twice, first) != noises[0]).any()


def test_a_stage_that_draws_nothing_changes_no_order():
    plain = read_order(count_to(20).shuffle())
    assert read_order(count_to(20).map(dict).shuffle()) == plain
    assert read_order(count_to(30).take(20).shuffle()) == plain
    assert read_order(count_to(20).shuffle().map(dict)) == plain


def test_batches_are_masked_where_they_are_padded():
    batches = count_to(10).batch(4, remainder="pad")
    *_, last = batches
    assert last.value["x"].tolist() == [8, 9, 0, 0]
    assert last.mask.tolist() == [True, True, False, False]
    assert batches.has_padding()
    assert batches.has_unequal_batches()
    parts = [
        [batch for batch in batches.iter_epoch(0, seed=0, start=2, process=(index, 4))]
        for index in range(4)
    ]
    assert [part[0].value["x"].tolist() for part in parts] == [[8], [9], [0], [0]]
    assert [part[0].mask.tolist() for part in parts] == [[True], [True], [False], [False]]


def test_row_of_a_batch_is_traced_to_where_it_comes_from():
    examples = Arrays({"x": np.arange(100, 110)})
    filtered = examples.filter(is_three_times).shuffle()
    sources = {
        "grouped": examples.shuffle().batch(4),
        "padded": filtered.batch(2, remainder="pad"),
        "repeated": examples.shuffle().batch(3).shuffle().repeat(2).map(lambda batch: batch),
    }
    for batches in sources.values():
        for number in range(len(batches)):
            batch = batches.read(number, seed=7, epoch=2)
            mask = batch.mask if isinstance(batch, fg.Batch) else None
            rows = batch.value["x"] if isinstance(batch, fg.Batch) else batch["x"]
            for row, value in enumerate(rows.tolist()):
                if mask is None or mask[row]:
                    traced = batches.trace_row(number, row, seed=7, epoch=2)
                    assert traced == f"example {value - 100} of Arrays"


@pytest.mark.parametrize("count", [2, 4])
def test_processes_read_equal_parts_of_each_batch(count: int):
    batches = count_to(24).shuffle().batch(8)
    parts = [[*batches.iter_epoch(1, seed=3, process=(i, count))] for i in range(count)]
    joined = [np.concatenate([b["x"] for b in bs]).tolist() for bs in zip(*parts, strict=True)]
    assert joined == read_batches(batches, epoch=1, seed=3)


def test_batches_that_do_not_divide_by_the_processes_are_refused():
    message = r"process 0 of 3 cannot have an equal part.*choose a size that divides by 3\)"
    with pytest.raises(ConfigurationError, match=message):
        next(count_to(24).batch(8).iter_epoch(0, seed=0, process=(0, 3)))
    with pytest.raises(ConfigurationError, match="2 are left for a last one.*remainder='drop'"):
        next(count_to(10).batch(4).iter_epoch(0, seed=0, process=(0, 4)))


def test_items_are_read_in_any_order_and_stacked():
    images = [{"image": np.full((2, 2), n), "label": n} for n in range(6)]
    dataset = Items(images)
    batch = dataset.shuffle().batch(6).read(0)
    assert (batch["image"][:, 0, 0] == batch["label"]).all()
    assert sorted(batch["label"].tolist()) == [*range(6)]

    class Many:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("several are asked for at once")

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [{"x": index} for index in indices]

    assert read_batches(Items(Many()).batch(4)) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigurationError, match="__getitem__ and __len__"):
        Items(iter(images))


def test_arrays_are_those_of_array_data_and_of_one_length():
    data = fg.ArrayData({"x": np.arange(6)}, 2)
    assert read_order(Arrays(data)) == [*range(6)]
    with pytest.raises(ConfigurationError, match=r"call \.shuffle\(\)"):
        Arrays(fg.ArrayData({"x": np.arange(6)}, 2, shuffle=True))
    with pytest.raises(DataError, match=r"data\['x'\] has 3, data\['y'\] has 4"):
        Arrays({"x": np.arange(3), "y": np.arange(4)})
    with pytest.raises(DataError, match="first axis counts examples"):
        Arrays({"x": 3})


def test_what_a_function_writes_to_is_not_the_source():
    array = np.arange(4)

    def zero(example: Any) -> Any:
        example["x"][...] = 0
        return example

    ragged = Arrays({"x": np.arange(8).reshape(4, 2)})
    assert ragged.map(zero).batch(4).read(0)["x"].sum() == 0
    assert ragged.get(3)["x"].tolist() == [6, 7]
    assert array.tolist() == [0, 1, 2, 3]


def test_examples_of_unequal_lengths_are_no_batch_and_the_error_says_what_to_do():
    dataset = count_to(4).map(lambda example: {"x": np.arange(example["x"] + 1)})
    rows = dataset.read([0, 2])["x"]
    assert isinstance(rows, Ragged)
    assert [row.tolist() for row in rows.split()] == [[0], [0, 1, 2]]
    with pytest.raises(DataError, match=r"1 to 4 rows.*pad\(length\).*pack\(length\).*bucket"):
        dataset.batch(4).read(0)
    with pytest.raises(DataError, match="several shapes"):
        count_to(4).map(lambda e: {"x": np.zeros((2, e["x"]))}).batch(4).read(0)
    with pytest.raises(DataError, match="several structures"):
        count_to(2).map(lambda e: {"x": 0} if e["x"] else {"y": 0}).batch(2).read(0)


def test_an_error_of_a_function_names_its_example_and_its_stage():
    def fail(example: Any) -> Any:
        if example["x"] == 2:
            raise ValueError("no two")
        return example

    order = read_order(count_to(10).shuffle())
    batches = count_to(10).shuffle().map(fail).batch(5)
    with pytest.raises(ValueError, match="no two") as caught:
        list(batches)
    first_note, second_note = caught.value.__notes__[:2]
    assert first_note == "in map(fail), of example 2 of Arrays"
    assert second_note == f"while batch {order.index(2) // 5} of batch(5, 'keep') was read"


def test_an_error_of_an_item_names_it():
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable") as caught:
        Items(Broken([1, 2]), name="photos").batch(2).read(0)
    assert caught.value.__notes__[0] == "in Items(photos, 2), example 0"


def test_items_that_are_read_together_are_a_list_with_one_for_each_number():
    class Rows:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return {"x": index}

        def __getitems__(self, numbers: list[int]) -> Any:
            return self.answer

    for answer, kind in (({"x": [0, 1], "y": [0, 1]}, "dict"), ([{"x": 0}], "list")):
        with pytest.raises(DataError, match=f"Rows returned a {kind} for 2 numbers, and not"):
            Items(Rows(answer)).batch(2).read(0)


def test_batches_are_read_by_integers_of_any_library():
    batches = count_to(5).batch(2)
    assert batches.read(np.int64(1))["x"].tolist() == [2, 3]  # type: ignore[arg-type]
    for number in (-1, 3, 1.0, True):
        with pytest.raises(DataError, match="there is no batch .* an epoch has 3, from 0"):
            batches.read(number)  # type: ignore[arg-type]


def test_windows_are_runs_of_consecutive_examples():
    windows = count_to(10).window(4, stride=3)
    rows = [window["x"].tolist() for window in windows.iter_examples()]
    assert rows == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert len(count_to(10).window(4)) == 2
    with pytest.raises(DataError, match="10 examples do not fill a window of 11"):
        count_to(10).window(11)


def test_batches_can_be_mapped_and_shuffled_as_a_whole():
    batches = count_to(8).batch(2).map(lambda batch: {"x": batch["x"] * 10}).shuffle()
    assert sorted(read_batches(batches)) == [[0, 10], [20, 30], [40, 50], [60, 70]]
    assert read_batches(batches) != read_batches(batches, epoch=1)
    padded = count_to(3).batch(2, remainder="pad").map(lambda batch: {"x": batch["x"] + 1})
    assert [b.value["x"].tolist() for b in padded] == [[1, 2], [3, 1]]


def test_batches_are_a_seekable_source_that_knows_its_smaller_batch():
    batches = count_to(10).batch(4)
    assert isinstance(batches, SeekableSource)
    assert not isinstance(count_to(10), SeekableSource)
    assert not batches.depends_on_epoch()
    assert batches.shuffle().depends_on_epoch()
    known = [*batches.iter_known_batches((0, 1))]
    assert [(number, batch["x"].tolist()) for number, batch in known] == [(2, [8, 9])]
    assert not batches.take(2).has_unequal_batches()
    ((number, batch),) = batches.shuffle().iter_known_batches((0, 1))
    assert read_batches(batches.shuffle())[number] == batch["x"].tolist() == [8, 9]


def test_a_part_of_a_random_order_may_have_the_smaller_batch_of_any_epoch():
    for remainder in ("keep", "pad"):
        whole = count_to(41).batch(4, remainder=remainder)
        for batches in (whole.shuffle().take(2), whole.shuffle().map(dict).skip(9).repeat(2)):
            counts = [
                np.sum(batch.mask) if remainder == "pad" else len(batch["x"])
                for epoch in range(30)
                for batch in batches.iter_epoch(epoch, seed=3)
            ]
            assert min(counts) == 1
            assert batches.has_unequal_batches()
            assert batches.has_padding() == (remainder == "pad")
        for equal in (whole.take(10).shuffle(), whole.take(2), whole.skip(10)):
            assert not equal.has_unequal_batches()


@pytest.mark.parametrize("build", [Arrays, lambda tree: Items([tree, tree]).map(dict)])
def test_masked_values_are_refused_and_masked_arrays_without_one_are_arrays(build: Any):
    values = np.ma.masked_greater(np.arange(4), 2)
    with pytest.raises(DataError, match=r"data\['x'\] is a masked array.*array\.filled\(value\)"):
        build({"x": values}).read([0, 1])
    whole = build({"x": np.ma.masked_greater(np.arange(4), 9)})
    assert type(whole.read([1])["x"]) is np.ndarray


def test_an_identity_has_less_than_a_kilobyte_and_differs_with_every_setting():
    dataset = count_to(1000)
    for number in range(40):
        dataset = dataset.skip(number + 1).take(900 - number * 10)
    lines = dataset.batch(2).get_identity()
    assert sum(map(len, lines)) < 900
    other = count_to(1000)
    for number in range(40):
        other = other.skip(number + 1).take(900 - number * 10 - (number == 20))
    assert other.batch(2).get_identity() != lines


def test_an_identity_says_whose_length_counts():
    pairs = Arrays({"a": np.ones((4, 3)), "b": np.ones((4, 2))})
    stages = {
        build(pairs, name).get_identity()
        for build in (
            lambda d, name: d.pad(4, length_of=name).batch(2),
            lambda d, name: d.bucket((4,), 2, length_of=name),
        )
        for name in "ab"
    }
    assert len(stages) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda d: d.batch(0), "batch: size is 0"),
        (lambda d: d.batch(2, remainder="cut"), "batch: remainder is 'cut'"),
        (lambda d: d.take(0), "take: count is 0"),
        (lambda d: d.skip(-1), "skip: count is -1"),
        (lambda d: d.repeat(0), "repeat: times is 0"),
        (lambda d: d.repeat().repeat(2), "never ends already"),
        (lambda d: d.repeat().shuffle(), r"put repeat\(\) after shuffle\(\)"),
        (lambda d: d.repeat().filter(bool), r"put repeat\(\) after it"),
        (lambda d: d.repeat().window(2), r"put repeat\(\) after window\(\)"),
        (lambda d: d.shuffle(reshuffle=False), "needs a seed of its own"),
        (lambda d: d.shuffle(seed=-1), "shuffle: seed is -1"),
        (lambda d: d.shard(4, 4), r"shard: index is 4; it must be in range\(4\)"),
        (lambda d: d.map(3), "map: function"),
        (lambda d: d.window(0), "window: size is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(build: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        build(count_to(10))


def test_a_dataset_is_no_source_of_batches():
    with pytest.raises(ConfigurationError, match="iterable of batches"):
        fg.DataSource(count_to(10))
    with pytest.raises(DataError, match="not all of 0 to 10"):
        count_to(10).read([0, 10])
    with pytest.raises(DataError, match=r"are bool, such as .*np\.flatnonzero\(mask\)"):
        count_to(3).read([True, False, True])
    for epoch in (-1, 1.5):
        with pytest.raises(ConfigurationError, match=f"data's epoch is {epoch}; it must be an int"):
            count_to(10).read([0], epoch=epoch)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="get: there are 10 examples, and no number -11"):
        count_to(10).get(-11)
    with pytest.raises(DataError, match=r"are float64, such as .*1\.5"):
        count_to(3).read([1.5, 0])
    with pytest.raises(
        ConfigurationError, match=r"a dictionary with 'x' is not a sequence.*Arrays"
    ):
        Items({"x": np.arange(3)})


def test_a_map_that_returns_several_dtypes_is_refused_in_any_batch():
    def halve(example: Any) -> Any:
        number = int(example["x"])
        return {"x": number / 2 if number % 2 else number // 2}

    halves = count_to(6).map(halve)
    assert halves.read([0, 2, 4])["x"].tolist() == [0, 1, 2]
    message = r"map\(halve\): data\['x'\] is float64 in example 3 of Arrays, and int64 in example 0"
    for order in ([3], [3, 5], [0, 3]):
        with pytest.raises(DataError, match=message):
            halves.read(order)
    with pytest.raises(DataError, match=r"float64 in example 1 of list, and int64 in example 0"):
        Items([{"x": 1}, {"x": 1.5}]).batch(1).read(1)
    with pytest.raises(
        DataError, match=r"several structures: example 1 .*'y'.*example 0 has .*'x'"
    ):
        Items([{"x": 1}, {"y": 1}]).batch(1).read(1)


def test_a_function_that_forgets_to_return_is_named():
    with pytest.raises(DataError, match=r"map\(<lambda>\) returned None for example 0 of Arrays"):
        count_to(9).map(lambda example: None).batch(4).read(0)
    with pytest.raises(DataError, match=r"map\(<lambda>\) returned None for batch 1 of batch\(4"):
        count_to(9).batch(4).map(lambda batch: None).read(1)
    with pytest.raises(DataError, match="example 1 of list in .* is None, which holds no array"):
        Items([{"x": 1}, None]).read([1])


def test_a_fit_of_examples_says_what_makes_batches():
    with pytest.raises(ConfigurationError, match=r"not Arrays.*: .*\.batch\(size\) makes batches"):
        fg.DataSource(count_to(4))
