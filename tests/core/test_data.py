import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite import ArrayData, Batch, DataSource
from fulgurite._src.data.batch import IndexedBatch
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchItem, BatchIterator
from hypothesis import given, strategies as st


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def bits(item: BatchItem) -> Any:
    """An item as values that compare exactly: dtype, shape and bytes of each leaf, in the batch's
    structure."""
    leaves, structure = jax.tree.flatten(item.batch)
    parts = [(np.asarray(leaf).dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in leaves]
    return parts, structure, item.epoch_end, item.position


# --- arrays in memory -----------------------------------------------------------------------------


def test_remainder_is_kept_dropped_or_padded() -> None:
    numbers = np.arange(1, 6)
    assert lists(ArrayData(numbers, 2, remainder="drop")) == [[1, 2], [3, 4]]
    assert lists(ArrayData(numbers, 2)) == [[1, 2], [3, 4], [5]]
    padded = list(ArrayData(numbers, 2, remainder="pad"))
    assert lists(batch.value for batch in padded) == [[1, 2], [3, 4], [5, 0]]
    assert lists(batch.mask for batch in padded) == [[True, True], [True, True], [True, False]]
    assert all(isinstance(batch, Batch) and batch.mask.dtype == bool for batch in padded)
    assert [
        len(ArrayData(numbers, 2, remainder=remainder)) for remainder in ("drop", "keep", "pad")
    ] == [2, 3, 3]


def test_a_seed_repeats_across_runs_and_differs_between_epochs() -> None:
    numbers = np.arange(100)
    first, again = (
        lists(ArrayData(numbers, 10, shuffle=True).iter_epoch(3, seed=7)) for _ in range(2)
    )
    assert first == again
    assert sorted(np.concatenate(first).tolist()) == list(range(100))
    other_epoch = lists(ArrayData(numbers, 10, shuffle=True).iter_epoch(4, seed=7))
    other_seed = lists(ArrayData(numbers, 10, shuffle=True).iter_epoch(3, seed=8))
    assert len({str(order) for order in (first, other_epoch, other_seed)}) == 3


def test_each_process_reads_its_shard_of_each_global_batch() -> None:
    data = ArrayData(np.arange(20), 8, remainder="drop")
    assert lists(data.iter_epoch(0, seed=0, process=(1, 4))) == [[2, 3], [10, 11]]


def test_the_order_is_the_documented_permutation() -> None:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([7, 9, 3])))
    expected = generator.permutation(20)
    data = ArrayData(np.arange(20), 6, shuffle=True)
    assert np.concatenate(list(data.iter_epoch(3, seed=(7, 9)))).tolist() == expected.tolist()
    data = ArrayData(np.arange(20), 6, shuffle=True, seed=(7, 9))
    assert np.concatenate(list(data.iter_epoch(3, seed=1))).tolist() == expected.tolist()


def test_plain_iteration_is_epoch_0_with_the_seed_of_the_data_or_0() -> None:
    data, seeded = (ArrayData(np.arange(20), 6, shuffle=True, seed=seed) for seed in (None, 5))
    assert lists(data) == lists(data) == lists(data.iter_epoch(0, seed=0))
    assert lists(seeded) == lists(data.iter_epoch(0, seed=5))


@given(
    examples=st.integers(1, 40),
    share=st.integers(1, 5),
    count=st.integers(1, 4),
    remainder=st.sampled_from(["drop", "keep", "pad"]),
    shuffle=st.booleans(),
    start=st.integers(0, 3),
)
def test_shards_of_all_processes_make_up_the_batches(
    examples: int, share: int, count: int, remainder: Any, shuffle: bool, start: int
) -> None:
    arrays = {
        "x": np.arange(1, 2 * examples + 1, dtype=np.float32).reshape(examples, 2),
        "y": np.arange(examples) > 3,
    }
    if remainder == "drop" and examples < share * count:
        return
    data = ArrayData(arrays, share * count, shuffle=shuffle, remainder=remainder)
    whole = list(data.iter_epoch(2, seed=0))
    assert len(whole) == len(data)
    if remainder == "keep" and examples % (share * count) % count:
        with pytest.raises(ConfigurationError, match="equal part"):
            data.iter_epoch(2, seed=0, process=(0, count))
        return
    parts = [
        list(data.iter_epoch(2, seed=0, start=start, process=(index, count)))
        for index in range(count)
    ]
    joined = [
        jax.tree.map(lambda *shares: np.concatenate(shares), *batch)
        for batch in zip(*parts, strict=True)
    ]
    assert jax.tree.structure(joined) == jax.tree.structure(whole[start:])
    jax.tree.map(np.testing.assert_array_equal, joined, whole[start:])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
@pytest.mark.parametrize("process", [(0, 1), (1, 3)])
def test_batches_gathered_on_device_equal_those_of_the_host(
    shuffle: bool, remainder: Any, process: tuple[int, int]
) -> None:
    values = np.random.default_rng(0).standard_normal((21, 2, 3)).astype(np.float32)
    arrays = {"x": values, "y": [np.arange(21, dtype=np.int32), values[:, 0, 0] > 0]}
    host = ArrayData(arrays, 6, shuffle=shuffle, remainder=remainder)
    device = ArrayData(arrays, 6, shuffle=shuffle, remainder=remainder, on_device=True)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(device.device_arrays))
    assert device.device_arrays is device.device_arrays
    indexed = list(device.iter_epoch(1, seed=3, process=process))
    assert all(
        isinstance(batch, IndexedBatch) and batch.indices.dtype == np.int32 for batch in indexed
    )
    gathered = [jax.jit(ArrayData.gather)(device.device_arrays, batch) for batch in indexed]
    expected = list(host.iter_epoch(1, seed=3, process=process))
    assert jax.tree.structure(gathered) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(gathered), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape, np.asarray(ours).tobytes()) == (
            theirs.dtype,
            theirs.shape,
            theirs.tobytes(),
        )


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">f8", ">c8"])
def test_arrays_in_the_other_byte_order_reach_a_step_in_that_of_the_machine(
    dtype: str, tmp_path: Path
) -> None:
    array = np.arange(6).astype(dtype)
    np.save(tmp_path / "array.npy", array)
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    for source in (
        [{"x": array[:3]}, {"x": array[3:]}],
        *(ArrayData({"x": a}, 3) for a in (array, mapped)),
    ):
        with BatchIterator(source, seed=0, epochs=1) as batches:
            values = [jnp.asarray(item.batch["x"]) for item in batches]
        assert np.concatenate(values).tolist() == [*range(6)]


def test_arrays_are_converted_to_jax_dtypes_once() -> None:
    wide = {"f": np.float64, "i": np.int64, "u": np.uint64, "c": np.complex128}
    narrow = {"f": np.float32, "i": np.int32, "u": np.uint32, "c": np.complex64}
    arrays = {name: np.arange(6).astype(dtype) for name, dtype in wide.items()}

    def dtypes(batch: Any) -> Any:
        return {name: leaf.dtype for name, leaf in batch.items()}

    data = ArrayData(arrays, 4)
    assert [dtypes(batch) for batch in data] == [dtypes(data.arrays)] * 2 == [narrow] * 2
    assert [batch["i"].tolist() for batch in data] == [[0, 1, 2, 3], [4, 5]]
    assert all(
        np.shares_memory(batch[name], data.arrays[name]) for batch in data for name in arrays
    )
    assert dtypes(next(iter(ArrayData(arrays, 4, shuffle=True, remainder="pad"))).value) == narrow
    assert dtypes(ArrayData(arrays, 4, on_device=True).device_arrays) == narrow
    assert np.shares_memory(next(iter(ArrayData(data.arrays, 4)))["f"], data.arrays["f"])
    with jax.enable_x64(True):
        batch = next(iter(ArrayData(arrays, 4)))
        assert dtypes(batch) == wide
        assert all(np.shares_memory(batch[name], arrays[name]) for name in arrays)


def test_dtypes_and_padding_of_every_kind() -> None:
    arrays = {
        "b": np.ones(3, bool),
        "h": np.ones((3, 2), jnp.bfloat16),
        "c": np.ones(3, np.complex64),
    }
    last = list(ArrayData(arrays, 2, remainder="pad"))[-1].value
    assert {name: leaf.dtype for name, leaf in last.items()} == {
        name: leaf.dtype for name, leaf in arrays.items()
    }
    assert last["b"].tolist() == [True, False]
    assert last["h"].astype(float).tolist() == [[1, 1], [0, 0]]
    assert last["c"].tolist() == [1, 0]


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: ArrayData({"x": np.ones(3), "y": np.ones(4)}, 2),
            r"data\['y'\] has 4 examples, data\['x'\] has 3",
        ),
        (
            lambda: ArrayData({"x": np.ones(3), "y": [np.ones(3), np.float32(1)]}, 2),
            r"\[1\] is a single number",
        ),
        (lambda: ArrayData([1, 2, 3], 2), r"data\[0\] is a single number"),
        (lambda: ArrayData(np.ones((0, 3)), 2), "data has 0 examples"),
        (lambda: ArrayData({}, 2), "0 examples"),
        (lambda: ArrayData(np.ones(3), 4, remainder="drop"), "3 examples do not fill a batch of 4"),
        (
            lambda: ArrayData({"name": np.array(["a", "b"])}, 1),
            r"data\['name'\] is a ndarray of dtype <U1",
        ),
        (lambda: ArrayData(np.array([1, None]), 1), "dtype object"),
        (lambda: ArrayData(np.zeros(2, "datetime64[s]"), 1), r"dtype datetime64\[s\]"),
    ],
)
def test_arrays_without_numbers_or_of_unequal_length_are_errors(
    make: Callable[[], ArrayData], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ArrayData(np.ones(3), 0), "batch_size is 0"),
        (lambda: ArrayData(np.ones(3), 2, seed=-1), "seed is -1"),
        (lambda: ArrayData(np.ones(3), 2, seed=(1, -1)), r"seed is \(1, -1\)"),
        (lambda: ArrayData(np.ones(3), 2, shuffle=True).iter_epoch(0, seed=-1), "seed is -1"),
        (
            lambda: ArrayData(np.ones(9), 3, remainder="drop").iter_epoch(
                0, seed=0, process=(0, 2)
            ),
            "batch_size is 3",
        ),
        (
            lambda: ArrayData(np.ones(5), 4).iter_epoch(0, seed=0, process=(0, 2)),
            "1 examples are left",
        ),
        (lambda: ArrayData(np.ones(4), 4).iter_epoch(0, seed=0, process=(2, 2)), "process 2 of 2"),
        (lambda: DataSource([np.ones(3)], prefetch=-1), "prefetch is -1"),
        (lambda: DataSource(lambda: [np.ones(3)]), "must be an iterable of batches, not <function"),
    ],
)
def test_invalid_arguments_are_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_masked_batch_is_a_pytree_for_every_transformation() -> None:
    batch = Batch({"x": np.arange(3.0)}, np.array([True, True, False]))
    assert jax.eval_shape(lambda batch: batch, batch).mask.shape == (3,)
    assert jax.tree.map(lambda leaf: None, batch).mask is None
    assert jax.vmap(lambda masked: jnp.where(masked.mask, masked.value["x"], 9))(
        batch
    ).tolist() == [0, 1, 9]


# --- streams --------------------------------------------------------------------------------------


class Again:
    """A source without a length that can be iterated again: one epoch is a call of `make`."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Deck:
    """A stateful source of `size` batches, with other numbers in each epoch.

    Asked to continue after an epoch's last batch, it gives the rest of that epoch, which is empty. It
    changes the state that it once returned, as a careless source may.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.place = {"pass": -1, "at": size}
        self.going_on = False

    def __iter__(self) -> Iterator[Any]:
        if not self.going_on:
            self.place.update({"pass": self.place["pass"] + 1, "at": 0})
        self.going_on = False
        while self.place["at"] < self.size:
            self.place["at"] += 1
            yield {"x": np.full(3, 100 * self.place["pass"] + self.place["at"])}

    def get_state(self) -> Any:
        return self.place

    def set_state(self, state: Any) -> None:
        self.place, self.going_on = dict(state), True


class WrappingDeck(Deck):
    """Asked to continue after an epoch's last batch, it gives the next epoch."""

    def set_state(self, state: Any) -> None:
        self.place, self.going_on = dict(state), state["at"] < self.size


class Tape:
    """A stateful iterator over `size` batches: it does not repeat."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> "Tape":
        return self

    def __next__(self) -> Any:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return np.full(2, self.at)

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state


def ones(count: int) -> Iterator[Any]:
    return (np.full(2, number, np.float32) for number in range(count))


@pytest.mark.parametrize(
    "source",
    [
        list(ones(3)),
        tuple(ones(3)),
        Again(lambda: ones(3)),
        DataSource(Again(lambda: ones(3)), prefetch=0),
        Deck(3),
        ArrayData(np.arange(5), 2),
        DataSource(ArrayData(np.arange(5), 2)),
        ArrayData(np.arange(5), 2, remainder="pad"),
    ],
)
def test_the_end_of_an_epoch_is_known_at_its_last_batch(source: Any) -> None:
    with BatchIterator(source, seed=0) as stream:
        items = list(islice(stream, 7))
    assert [item.epoch_end for item in items] == [False, False, True] * 2 + [False]
    assert [(item.position["epoch"], item.position["batch"]) for item in items] == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
    ]


def test_observers_get_each_item_as_it_is_consumed() -> None:
    consumed: list[Any] = []
    with BatchIterator([np.full(2, number) for number in range(4)], seed=0) as batches:
        batches.observe(lambda item: consumed.append(int(item.batch[0])))
        batches.look_ahead(2)
        assert consumed == []
        batches.consume(2)
        assert consumed == [0, 1]
        next(batches)
        assert consumed == [0, 1, 2]
    assert batches.process == (0, 1)


def test_each_epoch_is_shuffled_differently_by_the_seed() -> None:
    data = ArrayData(np.arange(20), 6, shuffle=True)
    with BatchIterator(data, seed=(1, 2), process=(1, 2)) as stream:
        items = list(islice(stream, 8))
    expected = [
        batch for epoch in (0, 1) for batch in data.iter_epoch(epoch, seed=(1, 2), process=(1, 2))
    ]
    assert lists(item.batch for item in items) == lists(expected)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ArrayData({"x": np.arange(11.0), "y": np.arange(11)}, 3, shuffle=True),
        lambda: ArrayData(np.arange(11), 3, shuffle=True, remainder="pad"),
        lambda: ArrayData(np.arange(11), 3, shuffle=True, on_device=True),
        lambda: list(ones(4)),
        lambda: Again(lambda: ones(4)),
        Deck,
        WrappingDeck,
    ],
)
def test_an_iterator_resumes_exactly_from_every_position(
    make: Callable[[], Any], prefetch: int
) -> None:
    steps = 14  # three epochs of four batches and the beginning of a fourth
    with BatchIterator(DataSource(make(), prefetch=prefetch), seed=5) as stream:
        assert stream.is_resumable
        items = list(islice(stream, steps))
    for consumed, item in enumerate(items[:-1], start=1):
        position = json.loads(json.dumps(item.position))
        with BatchIterator(
            DataSource(make(), prefetch=prefetch), seed=5, position=position
        ) as resumed:
            rest = list(islice(resumed, steps - consumed))
        assert list(map(bits, rest)) == list(map(bits, items[consumed:]))


@pytest.mark.parametrize(
    "make", [lambda: ArrayData(np.arange(11), 3, shuffle=True), lambda: Again(lambda: ones(9))]
)
def test_a_limit_shortens_every_epoch_and_resumes(make: Callable[[], Any]) -> None:
    with BatchIterator(make(), seed=5, limit=3) as stream:
        items = list(islice(stream, 8))
        assert stream.epoch_length == 3
    assert [item.epoch_end for item in items] == [False, False, True] * 2 + [False, False]
    for consumed, item in enumerate(items, start=1):
        with BatchIterator(make(), seed=5, limit=3, position=item.position) as resumed:
            assert list(map(bits, islice(resumed, 8 - consumed))) == list(
                map(bits, items[consumed:])
            )


def test_a_stateful_iterator_resumes_and_ends() -> None:
    with BatchIterator(Tape(4), seed=0) as stream:
        items = list(stream)
    assert lists(item.batch for item in items) == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert [item.epoch_end for item in items] == [False, False, False, True]
    for consumed, item in enumerate(items, start=1):
        with BatchIterator(Tape(4), seed=0, position=item.position) as resumed:
            assert resumed.is_resumable
            assert list(map(bits, resumed)) == list(map(bits, items[consumed:]))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("make", [Deck, WrappingDeck, lambda: Tape(9)])
def test_stateful_source_is_restored_to_the_last_consumed_batch(make: Any, prefetch: int) -> None:
    with BatchIterator(DataSource(make(), prefetch=prefetch), seed=0) as whole:
        expected = lists(jax.tree.leaves(item.batch)[0] for item in islice(whole, 9))
    source, batches = make(), []
    for count in (1, 3, 2, 3):  # the second ends with an epoch
        with BatchIterator(DataSource(source, prefetch=prefetch), seed=0) as stream:
            batches += lists(jax.tree.leaves(item.batch)[0] for item in islice(stream, count))
    assert batches == expected
    source = make()
    for _ in range(3):
        with BatchIterator(
            DataSource(source, prefetch=prefetch), seed=0, restore_on_close=True, epochs=1
        ) as stream:
            assert (
                lists(jax.tree.leaves(item.batch)[0] for item in islice(stream, 2)) == expected[:2]
            )


def test_an_iterator_does_not_repeat() -> None:
    source = ones(2)
    with BatchIterator(source, seed=0) as stream:
        assert not stream.is_resumable
        assert stream.epoch_length is None
        assert [item.epoch_end for item in stream] == [False, True]
        with pytest.raises(DataError, match="has ended"):
            stream.peek()
    with (
        pytest.raises(DataError, match="no batch 0 in epoch 0"),
        BatchIterator(source, seed=0) as stream,
    ):
        next(stream)


@pytest.mark.parametrize(
    "source, position, limit",
    [
        (ones(4), {"epoch": 0, "batch": 1}, None),
        (ones(4), {"epoch": 1, "batch": 0}, None),
        (Deck(), {"epoch": 0, "batch": 1, "source": {"pass": 0, "at": 1}}, 2),
        (list(ones(4)), {"epoch": 0, "batch": 1, "source": {}}, None),
        (list(ones(4)), {"epoch": 0, "batch": 4}, None),
        (ArrayData(np.arange(6), 2), {"epoch": 2, "batch": 3}, None),
        (ArrayData(np.arange(6), 2), {"epoch": 2, "batch": 2}, 2),
    ],
)
def test_a_position_outside_of_the_data_is_an_error(
    source: Any, position: Any, limit: int | None
) -> None:
    with pytest.raises(DataError, match="cannot resume from"):
        BatchIterator(source, seed=0, position=position, limit=limit)


def test_replaying_data_that_became_shorter_is_an_error() -> None:
    with (
        pytest.raises(DataError, match="no batch 5 in epoch 1: it is empty, is shorter"),
        BatchIterator(Again(lambda: ones(4)), seed=0, position={"epoch": 1, "batch": 5}) as stream,
    ):
        next(stream)


@pytest.mark.parametrize("source", [[], Again(lambda: iter(())), iter(())])
def test_data_without_a_batch_is_an_error(source: Any) -> None:
    with (
        pytest.raises(DataError, match="no batch 0 in epoch 0"),
        BatchIterator(source, seed=0) as stream,
    ):
        stream.peek()


def test_an_empty_second_pass_is_an_error() -> None:
    once = ones(2)
    with BatchIterator(Again(lambda: once), seed=0) as stream:
        assert [item.epoch_end for item in islice(stream, 2)] == [False, True]
        with pytest.raises(DataError, match="no batch 0 in epoch 1"):
            next(stream)


def test_the_length_of_an_epoch() -> None:
    assert BatchIterator(ArrayData(np.arange(5), 2), seed=0).epoch_length == 3
    assert BatchIterator(ArrayData(np.arange(5), 2), seed=0, limit=2).epoch_length == 2
    assert BatchIterator(list(ones(4)), seed=0).epoch_length == 4

    lengths = iter([10, 12, 8])
    with BatchIterator(Again(lambda: ones(next(lengths))), seed=0) as stream:
        reported_lengths = []
        for item in islice(stream, 29):
            if item.epoch_end:
                reported_lengths.append(stream.epoch_length)
            elif not reported_lengths:
                assert stream.epoch_length is None
        assert reported_lengths == [10, 12]

    with BatchIterator(Again(lambda: ones(4)), seed=0, position={"epoch": 2, "batch": 3}) as stream:
        assert next(stream).epoch_end
        assert stream.epoch_length == 4


def test_a_length_that_raises_type_error_counts_as_unknown() -> None:
    class Unsized(Again):
        def __len__(self) -> int:
            raise TypeError("this one has no length")

    assert BatchIterator(Unsized(lambda: ones(4)), seed=0).epoch_length is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_peek_does_not_consume(prefetch: int) -> None:
    with BatchIterator(DataSource(list(ones(3)), prefetch=prefetch), seed=0) as stream:
        assert lists([stream.peek(), stream.peek(), next(stream).batch, stream.peek()]) == [
            [0, 0],
            [0, 0],
            [0, 0],
            [1, 1],
        ]
        assert [item.batch[0] for item in islice(stream, 3)] == [1, 2, 0]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_copy_protects_batches_of_a_source_that_reuses_its_buffer(prefetch: int) -> None:
    def reusing() -> Iterator[Any]:
        buffer = {"x": np.zeros(2), "n": 0}
        for number in range(4):
            buffer["x"][:] = number
            buffer["n"] = number
            yield buffer

    with BatchIterator(DataSource(Again(reusing), copy=True, prefetch=prefetch), seed=0) as stream:
        items = list(islice(stream, 4))
    assert [(item.batch["x"].tolist(), item.batch["n"].tolist()) for item in items] == [
        ([0, 0], 0),
        ([1, 1], 1),
        ([2, 2], 2),
        ([3, 3], 3),
    ]


def test_leaves_become_arrays() -> None:
    leaves = {
        "a": 1.5,
        "b": np.int32(2),
        "c": True,
        "d": jnp.ones(2, jnp.bfloat16),
        "e": np.ones(1, jnp.bfloat16),
    }
    with BatchIterator([leaves], seed=0) as stream:
        batch = next(stream).batch
    assert [(type(batch[name]), batch[name].dtype) for name in "abc"] == [
        (np.ndarray, np.float64),
        (np.ndarray, np.int32),
        (np.ndarray, bool),
    ]
    assert batch["d"] is leaves["d"]
    assert batch["e"] is leaves["e"]


def test_arrays_are_passed_through_unchanged() -> None:
    array = np.ones(3)
    with BatchIterator([{"x": array}], seed=0) as stream:
        assert next(stream).batch["x"] is array


@pytest.mark.parametrize(
    "leaf", ["cat", np.array(["cat"]), np.array([None]), object(), np.timedelta64(1, "s")]
)
def test_leaves_that_are_not_numbers_are_errors(leaf: Any) -> None:
    source = Again(lambda: iter([{"image": np.ones(1), "names": [leaf]}]))
    with (
        pytest.raises(DataError, match=r"data\['names'\]\[0\] is a"),
        BatchIterator(source, seed=0) as stream,
    ):
        next(stream)


def test_a_source_state_that_cannot_be_saved_is_an_error() -> None:
    class Opaque(Deck):
        def get_state(self) -> Any:
            return {"at": {1, 2}}

    with pytest.raises(DataError, match=r"state\(\) of the data \(Opaque\) cannot be saved: set"):
        next(BatchIterator(DataSource(Opaque(), prefetch=0), seed=0))


def test_the_state_of_a_source_is_copied_when_it_is_taken() -> None:
    class Buffered(Deck):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = np.zeros(2)

        def get_state(self) -> Any:
            return {"buffer": self.buffer, "at": b"\xff"}

    source = Buffered()
    iterator = BatchIterator(DataSource(source, prefetch=0), seed=0)
    next(iterator)
    source.buffer += 1
    item = next(iterator)
    source.buffer += 1
    assert item.position["source"]["buffer"].tolist() == [0, 0]
    assert item.position["source"]["at"] == b"\xff"


# --- the thread -----------------------------------------------------------------------------------


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fulgurite-data"]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_exception_of_the_source_is_raised_unchanged_after_earlier_batches(prefetch: int) -> None:
    failure = ZeroDivisionError("in the source")

    def failing() -> Iterator[Any]:
        yield from ones(3)
        raise failure

    stream = BatchIterator(DataSource(Again(failing), prefetch=prefetch), seed=0)
    items = list(islice(stream, 3))
    assert [(item.epoch_end, item.position) for item in items] == [
        (False, {"epoch": 0, "batch": number}) for number in (1, 2, 3)
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        next(stream)
    assert caught.value is failure
    assert not threads()


def test_sources_in_memory_need_no_thread() -> None:
    for source in (list(ones(3)), tuple(ones(3)), ArrayData(np.arange(5), 2)):
        stream = BatchIterator(source, seed=0)
        next(stream)
        assert not threads()
    with BatchIterator(Again(lambda: ones(3)), seed=0) as stream:
        next(stream)
        assert len(threads()) == 1
    assert not threads()


def test_the_queue_is_bounded_and_close_ends_a_thread_that_waits_for_room() -> None:
    produced = []
    full, overfull = threading.Event(), threading.Event()
    ended_in: list[str] = []

    def endless() -> Iterator[Any]:
        try:
            while True:
                produced.append(len(produced))
                if (
                    len(produced) == 5
                ):  # one consumed, two in the queue, one that waits for room, one looked ahead
                    full.set()
                elif len(produced) > 5:
                    overfull.set()
                yield np.zeros(1)
        finally:
            ended_in.append(threading.current_thread().name)

    stream = BatchIterator(DataSource(Again(endless), prefetch=2), seed=0)
    next(stream)
    assert full.wait(60)
    assert not overfull.wait(0.3)
    stream.close()
    assert ended_in == ["fulgurite-data"]
    assert not threads()
    assert len(produced) == 5
    assert next(stream, None) is None
    stream.close()


def test_an_iterator_that_is_garbage_collected_ends_its_thread() -> None:
    stream = BatchIterator(Again(lambda: ones(100)), seed=0)
    next(stream)
    assert threads()
    del stream
    assert not threads()


def test_an_iterator_can_be_closed_before_its_first_batch() -> None:
    stream = BatchIterator(Again(lambda: ones(3)), seed=0)
    stream.close()
    assert next(stream, None) is None
    assert not threads()


def test_a_memory_map_stays_on_disk_and_is_converted_batch_by_batch(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=">f8").reshape(6, 2)
    numbers.tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", dtype=">f8", mode="r", shape=(6, 2))
    choices: tuple[dict[str, Any], ...] = ({}, {"shuffle": True}, {"remainder": "pad"})
    for options in choices:
        data = ArrayData({"x": mapped}, 4, **options)
        assert isinstance(data.arrays["x"], np.memmap) and data.arrays["x"].dtype == ">f8"
        batches = list(data)
        first = batches[0].value if options == {"remainder": "pad"} else batches[0]
        assert first["x"].dtype == np.float32 and first["x"].dtype.isnative
        in_memory = next(iter(ArrayData({"x": np.asarray(numbers, np.float32)}, 4, **options)))
        in_memory = in_memory.value if options == {"remainder": "pad"} else in_memory
        assert np.array_equal(first["x"], in_memory["x"])
    device_data = ArrayData({"x": mapped}, 4, on_device=True)
    assert device_data.device_arrays["x"].tolist() == numbers.tolist()
