"""Files of tokens: documents, windows, and what is wrong with a file."""

import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Tokens, write_tokens


def write_shards(folder: Path) -> tuple[list[Path], list[list[int]]]:
    """Write seven documents to three files, and return both."""
    documents = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [], [11, 12, 13], [14]]
    paths = [folder / f"{name}.bin" for name in "abc"]
    for path, part in zip(paths, (documents[:2], documents[2:5], documents[5:]), strict=True):
        write_tokens(path, part)
    return paths, documents


def test_documents_are_read_from_several_shards(tmp_path: Path):
    paths, documents = write_shards(tmp_path)
    tokens = Tokens(paths)
    assert len(tokens) == 7
    assert tokens.num_tokens == 14
    rows = tokens.read([6, 0, 2, 5, 4])["tokens"]
    assert [row.tolist() for row in rows.split()] == [documents[i] for i in (6, 0, 2, 5, 4)]
    assert rows.values.dtype == np.int32
    assert [e["tokens"].tolist() for e in tokens.iter_examples()] == documents


def test_windows_of_a_memory_map_come_with_the_tokens_that_follow(tmp_path: Path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    windows = Tokens(tmp_path / "a.bin", has_offsets=False).window(10)
    assert len(windows) == 9
    last = windows.get(8)
    assert last["tokens"].tolist() == [*range(80, 90)]
    assert last["targets"].tolist() == [*range(81, 91)]
    plain = Tokens(tmp_path / "a.bin", has_offsets=False).window(10, stride=5, targets=False)
    assert len(plain) == 19
    assert plain.get(18)["tokens"].tolist() == [*range(90, 100)]


@pytest.mark.parametrize("size", [1, 3, 5, 13])
def test_windows_cross_the_ends_of_shards(tmp_path: Path, size: int):
    paths, documents = write_shards(tmp_path)
    flat = [*chain(*documents)]
    windows = Tokens(paths).window(size, stride=1)
    batch = windows.read(np.arange(len(windows))[::-1])
    starts = [*range(14 - size)][::-1]
    assert batch["tokens"].tolist() == [flat[i : i + size] for i in starts]
    assert batch["targets"].tolist() == [flat[i + 1 : i + 1 + size] for i in starts]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_files_of_every_dtype_give_the_same_tokens(tmp_path: Path, dtype: Any):
    values = np.arange(50, dtype=dtype)
    values.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", values)
    for path in ("a.bin", "b.npy"):
        assert (
            Tokens(tmp_path / path, dtype=dtype, has_offsets=False).window(8).get(5)["targets"][-1]
            == 48
        )
    with pytest.raises(ConfigurationError, match="uint16, uint32 or int32"):
        Tokens(tmp_path / "a.bin", dtype="int64")


def test_a_file_is_never_read_as_a_whole(tmp_path: Path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2 * 10**9)  # sparse: it takes no room
    tracemalloc.start()
    batches = Tokens(path, has_offsets=False).window(1024).shuffle().batch(32)
    assert len(batches) == 30518
    assert batches.read(20_000)["tokens"].shape == (32, 1024)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_missing_or_truncated_file_is_named_at_once(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.bin is missing"):
        Tokens(tmp_path / "gone.bin")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"odd\.bin has 3 bytes.*truncated"):
        Tokens(tmp_path / "odd.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.bin is empty"):
        Tokens(tmp_path / "empty.bin")
    np.save(tmp_path / "cut.npy", np.arange(1000))
    whole = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:500])
    with pytest.raises(DataError, match=r"cut\.npy is damaged or truncated"):
        Tokens(tmp_path / "cut.npy")
    np.save(tmp_path / "floats.npy", np.ones((3, 2)))
    with pytest.raises(DataError, match=r"floats\.npy holds float64\[3, 2\]"):
        Tokens(tmp_path / "floats.npy")
    paths, _ = write_shards(tmp_path)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"b\.bin has 4 tokens.*end at 6.*b\.offsets\.npy"):
        Tokens(paths)
    (tmp_path / "a.offsets.npy").unlink()
    with pytest.raises(DataError, match=r"a\.offsets\.npy, which says.*missing.*has_offsets=False"):
        Tokens(paths[0])
    assert len(Tokens(paths[0], has_offsets=False)) == 1
    with pytest.raises(ConfigurationError, match="at least one file"):
        Tokens([])


def test_tokens_that_do_not_fit_are_not_written(tmp_path: Path):
    with pytest.raises(DataError, match=r"document 1 has the token 70000.*dtype='uint32'"):
        write_tokens(tmp_path / "a.bin", [[1], [2, 70_000]])
    path = write_tokens(tmp_path / "a.bin", [[1], [2, 70_000]], dtype="uint32")
    assert Tokens(path, dtype="uint32").get(1)["tokens"].tolist() == [2, 70_000]


def test_a_file_is_there_only_once_it_is_complete(tmp_path: Path):
    def fail() -> Any:
        yield [1, 2]
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_tokens(tmp_path / "a.bin", fail())
    with pytest.raises(DataError, match=r"a\.bin is missing"):
        Tokens(tmp_path / "a.bin")


def test_other_contents_have_another_identity(tmp_path: Path):
    paths, _ = write_shards(tmp_path)
    before = Tokens(paths).window(4).batch(2).get_identity()
    assert Tokens(paths).window(4).batch(2).get_identity() == before
    write_tokens(paths[1], [[5, 6, 7, 8], [9, 99], []])
    assert Tokens(paths).window(4).batch(2).get_identity() != before


def test_a_file_shorter_than_a_window_is_an_error(tmp_path: Path):
    paths, _ = write_shards(tmp_path)
    assert len(Tokens(paths).window(13)) == 1
    with pytest.raises(DataError, match="14 tokens, and a window with its targets takes 15"):
        Tokens(paths).window(14)


@pytest.mark.parametrize(
    ("document", "dtype", "message"),
    [
        ([-1, 2], "uint16", r"document 1 has the token -1.*a token is not negative"),
        ([5, 2**16], "uint16", r"has the token 65536.*0 to 65535: .*dtype='uint32'"),
        ([2**32], "uint16", r"has the token 4294967296.*tokens are int32"),
        ([2**31], "uint32", r"has the token 2147483648.*0 to 2147483647: tokens are int32"),
        ([1.5], "uint16", r"document 1 holds float64, such as .*1\.5.*a token is an integer"),
        ([True], "uint16", "document 1 holds bool"),
        ("abc", "uint16", "document 1 holds <U3, such as .*abc.*Turn text into tokens"),
        ([[1], [2, 3]], "uint16", "document 1 cannot be an array"),
    ],
)
def test_what_is_no_token_is_not_written(tmp_path: Path, document: Any, dtype: Any, message: str):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "a.bin", [[1], document], dtype=dtype)
    assert not (tmp_path / "a.bin").exists()


def test_files_of_tokens_have_a_dtype_of_integers(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="write_tokens: dtype is float32"):
        write_tokens(tmp_path / "a.bin", [[1]], dtype="float32")
    path = write_tokens(tmp_path / "a.bin", [[], [2**31 - 1]], dtype="uint32")
    assert Tokens(path, dtype="uint32").get(1)["tokens"].tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("name", "tokens", "token"),
    [
        ("a.npy", np.array([2**40 + 7, 3, 9]), 2**40 + 7),
        ("a.npy", np.array([3, 2**31 + 5, 9], np.uint32), 2**31 + 5),
        ("a.npy", np.array([3, 9, -5], np.int16), -5),
        ("a.bin", np.array([3, -5, 9], np.int32), -5),
    ],
)
def test_tokens_that_int32_does_not_hold_are_refused_when_read(
    tmp_path: Path, name: str, tokens: np.ndarray, token: int
):
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    dataset = Tokens(path, dtype="int32", has_offsets=False)
    for broken in (dataset, dataset.window(2), dataset.pack(3)):
        with pytest.raises(DataError, match=f"has the token {token}, and tokens are int32"):
            list(broken.batch(1))


def test_tokens_are_written_to_a_file_of_nothing_but_numbers(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"a\.npy would be read as a file of NumPy"):
        write_tokens(tmp_path / "a.npy", [[1]])
    # Both would have their places in a.offsets.npy.
    for name in ("a.0", "a.1", "a"):
        with pytest.raises(ConfigurationError, match=r"a(\.\d)? has no \.bin: name it NAME\.bin"):
            write_tokens(tmp_path / name, [[1, 2], [3]])


@pytest.mark.parametrize("documents", [[1, 2, 3], [np.int64(1)], [np.ones((2, 3), int)]])
def test_a_document_is_a_sequence_of_tokens(tmp_path: Path, documents: Any):
    with pytest.raises(DataError, match=r"document 0 has the shape .* give a list of documents"):
        write_tokens(tmp_path / "a.bin", documents)
    assert not [*tmp_path.iterdir()]


def test_a_window_is_traced_to_the_file_in_which_it_begins(tmp_path: Path):
    paths, _ = write_shards(tmp_path)
    windows = Tokens(paths).window(2).batch(2)
    starts = [str(paths[number]) for number in (0, 0, 1, 1, 1, 2)]
    traces = [windows.trace_row(number // 2, number % 2) for number in range(6)]
    assert all(start in trace for start, trace in zip(starts, traces, strict=True))


def test_a_shard_of_empty_documents_is_one_of_several(tmp_path: Path):
    paths = [tmp_path / f"{name}.bin" for name in "abc"]
    for path, documents in zip(paths, ([[1, 2]], [[], []], [[], [3]]), strict=True):
        write_tokens(path, documents)
    tokens = Tokens(paths)
    assert [e["tokens"].tolist() for e in tokens.iter_examples()] == [[1, 2], [], [], [], [3]]
    assert tokens.window(3, targets=False).get(0)["tokens"].tolist() == [1, 2, 3]
    assert tokens.pack(3, how="split").get(0)["segments"].tolist() == [1, 1, 2]
    with pytest.raises(DataError, match=r"documents of .*b\.bin have no tokens"):
        Tokens(paths[1])
    paths[0].write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.bin has 0 tokens, and its documents end at 2"):
        Tokens(paths)


def test_a_document_that_ends_before_it_begins_is_named(tmp_path: Path):
    path = write_tokens(tmp_path / "a.bin", [[1, 2], [3, 4], [5]])
    np.save(tmp_path / "a.offsets.npy", np.array([0, 4, 2, 5]))
    with pytest.raises(DataError, match=r"document 1 of .*a\.bin ends before it begins"):
        Tokens(path).read([0, 1, 2])
