"""Packing against rows written out by hand, and against a plain definition in NumPy."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Arrays, Dataset, Items, Tokens, make_attention_mask, write_tokens
from fulgurite_testing import check_source

LENGTHS = [3, 4, 2, 5, 1]


def write_numbered(folder: Path, lengths: list[int] = LENGTHS) -> Tokens:
    """Write documents whose tokens are numbered from 1 through all of them."""
    ends = np.cumsum(lengths)
    documents = [range(end - n + 1, end + 1) for end, n in zip(ends, lengths, strict=True)]
    return Tokens(write_tokens(folder / "numbered.bin", documents))


def number_items(lengths: list[int] = LENGTHS) -> Dataset:
    """Return the same documents as items of a sequence."""
    ends = np.cumsum(lengths)
    return Items([{"tokens": np.arange(e - n, e) + 1} for e, n in zip(ends, lengths, strict=True)])


def read_rows(dataset: Dataset) -> list[tuple[list[int], list[int], list[int]]]:
    names = ("tokens", "segments", "positions")
    rows = [*dataset.iter_examples()]
    assert all((row["mask"] == (row["segments"] > 0)).all() for row in rows)
    return [tuple(row[name].tolist() for name in names) for row in rows]  # type: ignore[misc]


BY_HAND: dict[str, Any] = {
    "first_fit": [
        ([1, 2, 3, 8, 9, 0], [1, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 0]),
        ([4, 5, 6, 7, 0, 0], [1, 1, 1, 1, 0, 0], [0, 1, 2, 3, 0, 0]),
        ([10, 11, 12, 13, 14, 15], [1, 1, 1, 1, 1, 2], [0, 1, 2, 3, 4, 0]),
    ],
    "best_fit": [
        ([1, 2, 3, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 2, 0, 0, 0]),
        ([4, 5, 6, 7, 8, 9], [1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1]),
        ([10, 11, 12, 13, 14, 15], [1, 1, 1, 1, 1, 2], [0, 1, 2, 3, 4, 0]),
    ],
    "split": [
        ([1, 2, 3, 4, 5, 6], [1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2]),
        ([7, 8, 9, 10, 11, 12], [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]),
        ([13, 14, 15, 0, 0, 0], [1, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0]),
    ],
}


@pytest.mark.parametrize("how", [*BY_HAND])
def test_rows_are_those_written_out_by_hand(tmp_path: Path, how: Any):
    for dataset in (write_numbered(tmp_path), number_items()):
        packed = dataset.pack(6, how=how, open_rows=2)
        assert read_rows(packed) == BY_HAND[how]
        batch = packed.read([2, 0, 2])
        assert batch["tokens"].tolist() == [BY_HAND[how][i][0] for i in (2, 0, 2)]
        assert {name: leaf.dtype.name for name, leaf in batch.items() if name != "tokens"} == {
            "segments": "int32",
            "positions": "int32",
            "mask": "bool",
        }


def pack_by_hand(lengths: list[int], size: int, num_open: int, how: str) -> list[list[int]]:
    """Return the numbers of the examples in each row."""
    done: list[list[int]] = []
    rows: list[list[int]] = [[] for _ in range(num_open)]
    for index, length in enumerate(lengths):
        if length == 0:
            continue
        rooms = [size - sum(lengths[i] for i in row) for row in rows]
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if not fitting:
            done += [row for row in rows if row]
            rows = [[] for _ in range(num_open)]
            fitting = [0]
            rooms = [size] * num_open
        number = fitting[0] if how == "first_fit" else min(fitting, key=lambda n: (rooms[n], n))
        rows[number].append(index)
    return done + [row for row in rows if row]


@pytest.mark.parametrize("seed", range(12))
def test_random_documents_are_packed_as_the_plain_definition_says(tmp_path: Path, seed: int):
    rng = np.random.default_rng(seed)
    size, num_open = int(rng.integers(4, 20)), int(rng.integers(1, 6))
    lengths = rng.integers(0, size + 1, rng.integers(1, 40)).tolist()
    lengths[0] = max(lengths[0], 1)
    documents = [[*example["tokens"]] for example in number_items(lengths).iter_examples()]
    tokens = write_numbered(tmp_path, lengths)
    for how in ("first_fit", "best_fit"):
        expected = pack_by_hand(lengths, size, num_open, how)
        packed = tokens.pack(size, how=how, open_rows=num_open)  # type: ignore[arg-type]
        assert len(packed) == len(expected)
        for row, members in zip(packed.iter_examples(), expected, strict=True):
            joined = [token for i in members for token in documents[i]]
            numbers = [n for n, i in enumerate(members, 1) for _ in documents[i]]
            places = [place for i in members for place in range(len(documents[i]))]
            rest = [0] * (size - len(joined))
            assert row["tokens"].tolist() == joined + rest
            assert row["segments"].tolist() == numbers + rest
            assert row["positions"].tolist() == places + rest
    packed = tokens.pack(size, how="split")
    flat = [*range(1, sum(lengths) + 1)]
    rows = [row["tokens"][row["mask"]].tolist() for row in packed.iter_examples()]
    assert rows == [flat[low : low + size] for low in range(0, len(flat), size)]
    owners = [i for i, n in enumerate(lengths) for _ in range(n)]
    for number, row in enumerate(packed.iter_examples()):
        part = owners[number * size : (number + 1) * size]
        ranks = {owner: rank for rank, owner in enumerate(dict.fromkeys(part), 1)}
        assert row["segments"][row["mask"]].tolist() == [ranks[owner] for owner in part]
        places = [place - part.index(owner) for place, owner in enumerate(part)]
        assert row["positions"][row["mask"]].tolist() == places


def test_an_example_longer_than_a_row_is_an_error_that_names_it_unless_it_is_split(tmp_path: Path):
    tokens = write_numbered(tmp_path, [3, 7])
    with pytest.raises(
        DataError,
        match=r"document 1 of .*numbered\.bin has 7 elements, more than a row of 6.*split",
    ):
        tokens.pack(6)
    rows = read_rows(tokens.pack(6, how="split"))
    assert [row[0] for row in rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]


def test_a_token_sees_its_own_segment_up_to_itself(tmp_path: Path):
    row = write_numbered(tmp_path).pack(6, open_rows=2).get(0)
    mask = np.asarray(make_attention_mask(jnp.asarray(row["segments"])))
    by_hand = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert mask.astype(int).tolist() == by_hand
    both_ways = np.asarray(make_attention_mask(jnp.asarray(row["segments"])[None], causal=False))[0]
    assert (both_ways == (np.array(by_hand) + np.array(by_hand).T > 0)).all()


def test_the_first_element_of_each_segment_is_masked_if_asked(tmp_path: Path):
    tokens = write_numbered(tmp_path)
    masks = [row["mask"] for row in tokens.pack(6, open_rows=2).iter_examples()]
    assert masks[0].tolist() == [True] * 5 + [False]
    packed = tokens.pack(6, open_rows=2, mask_first=True)
    assert packed.get(0)["mask"].tolist() == [False, True, True, False, True, False]


def test_all_arrays_of_an_example_are_packed_together():
    items = [{"tokens": np.arange(n), "weights": np.full((n, 2), 0.5 * n)} for n in (2, 1, 3)]
    row = Items(items).pack(7).get(0)
    assert row["tokens"].tolist() == [0, 1, 0, 0, 1, 2, 0]
    assert row["weights"][:, 1].tolist() == [1.0, 1.0, 0.5, 1.5, 1.5, 1.5, 0.0]
    batch = Items(items).pack(7).batch(1).read(0)
    assert batch["weights"].shape == (1, 7, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Arrays({"x": np.arange(3)}).pack(4), "only numbers"),
        (lambda: Arrays(np.ones((3, 2))).pack(4).get(0), "not dictionaries"),
        (lambda: Arrays({"mask": np.ones((3, 2))}).pack(4).get(0), "have mask already"),
        (lambda: Arrays({"x": np.ones((3, 2)), "y": np.ones((3, 1))}).pack(4), "length_of="),
        (
            lambda: Arrays({"x": np.ones((3, 2)), "y": np.ones(3)}).pack(4).get(0),
            r"data\['y'\] .* is a number, which cannot be packed",
        ),
        (
            lambda: (
                Arrays({"x": np.ones((3, 2)), "y": np.ones((3, 1))}).pack(4, length_of="x").get(0)
            ),
            r"data\['x'\] and data\['y'\] of .* have unequal lengths",
        ),
        (lambda: number_items().shuffle().pack(6), r"pack\(\) first, and shuffle\(\) the rows"),
        (lambda: number_items().pack(6, how="cut"), "pack: how is 'cut'"),  # type: ignore[arg-type]
        (lambda: number_items().pack(0), "pack: length is 0"),
        (lambda: number_items().pack(6, length_of="ids"), "no array 'ids'"),
    ],
)
def test_what_cannot_be_packed_is_refused(build: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_padding_makes_examples_of_one_length_with_a_mask():
    items = [{"tokens": np.arange(1, n + 1), "label": n} for n in (2, 4, 1)]
    batch = Items(items).pad(4).batch(3).read(0)
    assert batch["tokens"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert batch["mask"].tolist() == [[n > place for place in range(4)] for n in (2, 4, 1)]
    assert batch["label"].tolist() == [2, 4, 1]
    with pytest.raises(DataError, match=r"example 1 of list has 4 elements, more than 3"):
        Items(items).pad(3).read([0, 1])
    cut = Items(items).pad(3, truncate=True).read([1, 0])
    assert cut["tokens"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert cut["mask"].tolist() == [[True, True, True], [True, True, False]]
    with pytest.raises(ConfigurationError, match="have a mask already"):
        Items(items).pad(4).pad(6).get(0)


@pytest.mark.parametrize("how", [*BY_HAND])
def test_packed_rows_resume_at_every_position_and_are_shuffled_as_a_whole(tmp_path: Path, how: Any):
    tokens = write_numbered(tmp_path, [3, 4, 2, 5, 1, 6, 2, 2, 4, 1, 3])
    packed = tokens.pack(6, how=how, open_rows=2)
    check_source(lambda: packed.shuffle().batch(2))
    epochs = [
        sorted(row["tokens"].tolist() for row in packed.shuffle().iter_examples(epoch=epoch))
        for epoch in range(2)
    ]
    assert (
        epochs[0] == epochs[1] == sorted(row["tokens"].tolist() for row in packed.iter_examples())
    )


@pytest.mark.parametrize("dtype", ["bool", "uint8", "complex64", "bfloat16", "float8_e4m3fn"])
def test_numbers_of_every_dtype_are_padded_packed_and_bucketed(dtype: Any):
    kind = jnp.dtype(dtype)
    items = Items([{"x": np.ones(n, kind)} for n in (2, 1)])
    expected = [[1, 1, 0], [1, 0, 0]]
    for batch in (items.pad(3).batch(2).read(0), items.bucket((3,), 2).read(0)):
        assert batch["x"].dtype == kind
        assert batch["x"].astype(np.complex64).tolist() == expected
    packed = items.pack(4).batch(1).read(0)
    assert packed["x"].dtype == kind
    assert packed["x"].astype(np.complex64).tolist() == [[1, 1, 1, 0]]
    with pytest.raises(DataError, match=r"data\['x'\] holds <U1, not numbers"):
        Items([{"x": np.array(["a"])}]).pad(2).get(0)
