"""Files of tokens: one long array, with or without the places at which documents begin."""

import hashlib
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import ConfigurationError, DataError
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import DTypeLike

from fulgurite_data.content import Mark, look_at_files
from fulgurite_data.examples import Ragged
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass, start_pass
from fulgurite_data.writing import write_whole

_HASHED_BYTES = 4096
_MAX_TOKEN = 2**31 - 1
_SMALL_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


class TokenShard:
    """A file of tokens, memory-mapped.

    Args:
        path: a `.npy` file, or a `.bin` file of nothing but numbers.
        dtype: of the numbers in a `.bin` file.
        has_offsets: whether a file beside it says where documents begin.

    Raises:
        DataError: the file is missing, empty or truncated, or its documents do not fit.
    """

    def __init__(self, path: Path, dtype: np.dtype, has_offsets: bool = True) -> None:
        self.path = path
        self.dtype = dtype
        self.tokens = _map_tokens(path, dtype, has_offsets)
        self.has_offsets = has_offsets
        num_tokens = len(self.tokens)
        self.offsets = _load_offsets(path, num_tokens) if has_offsets else np.array([0, num_tokens])
        self._windows: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return where the file is: a process maps it itself."""
        return {"path": self.path, "dtype": self.dtype, "has_offsets": self.has_offsets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TokenShard.__init__(self, **state)

    def view_windows(self, size: int) -> np.ndarray:
        """Return all runs of some length as one array, a view `(tokens - size + 1, size)`.

        Args:
            size: the length.
        """
        # NumPy takes 20 us to make such a view, a fifth of the time for a batch.
        windows = self._windows.get(size)
        if windows is None:
            windows = sliding_window_view(self.tokens, size)
            self._windows[size] = windows
        return windows

    def make_fingerprint(self) -> str:
        """Return the number of tokens and a hash of the first and last of them."""
        ends = self.tokens[:_HASHED_BYTES].tobytes() + self.tokens[-_HASHED_BYTES:].tobytes()
        return f"{len(self.tokens)}-{hashlib.sha256(ends).hexdigest()[:8]}"


class TokenStream:
    """The tokens of several files as one long array.

    Args:
        shards: the files.
    """

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        self.shards = shards
        sizes = [len(shard.tokens) for shard in shards]
        self.bounds = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.bounds[-1])

    def read_runs(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Return runs of tokens as an array `(k, size)`.

        Args:
            starts: the first token of each, int64 `(k,)`.
            size: the number of tokens in each.
        """
        if len(self.shards) == 1:
            return self.shards[0].view_windows(size)[starts]
        numbers = np.searchsorted(self.bounds, starts, side="right") - 1
        first = int(numbers[0])
        is_one_shard = (numbers == first).all() and starts.max() + size <= self.bounds[first + 1]
        if is_one_shard:
            return self.shards[first].view_windows(size)[starts - self.bounds[first]]
        spans = self.read_spans(starts, np.full(len(starts), size))
        return spans.reshape(len(starts), size)

    def read_spans(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return spans of tokens, one after the other.

        Args:
            starts: the first token of each, int64 `(k,)`.
            lengths: the number of its tokens, int64 `(k,)`.
        """
        numbers = np.searchsorted(self.bounds, starts, side="right") - 1
        parts = []
        for number, start, length in zip(
            numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            while length > 0:
                low = start - int(self.bounds[number])
                part = self.shards[number].tokens[low : low + length]
                parts.append(part)
                start += len(part)
                length -= len(part)
                number += 1
        return np.concatenate(parts) if parts else self.shards[0].tokens[:0]


class TokenNode(Node):
    """The documents of files of tokens.

    Args:
        paths: the files.
        dtype: of the numbers in `.bin` files.
        has_offsets: as of `TokenShard`.
    """

    def __init__(self, paths: Sequence[Path], dtype: DTypeLike, has_offsets: bool = True) -> None:
        kind = _check_dtype("Tokens", dtype)
        if not paths:
            raise ConfigurationError("Tokens: give the path of at least one file")
        self.shards = [TokenShard(path, kind, has_offsets) for path in paths]
        self.stream = TokenStream(self.shards)
        counts = [len(shard.offsets) - 1 for shard in self.shards]
        self.documents = np.cumsum([0, *counts])
        self.length = int(self.documents[-1])
        if not len(self.stream):
            raise DataError(f"the documents of {', '.join(map(str, paths))} have no tokens")
        prints = [shard.make_fingerprint() for shard in self.shards]
        digest = prints[0]
        if len(prints) > 1:
            digest = hashlib.sha256(" ".join(prints).encode()).hexdigest()[:8]
        name = self.shards[0].path.name
        self.stages = (
            f"Tokens({name}, {len(prints)} files, {self.length} documents, "
            f"{len(self.stream)} tokens, {digest})",
        )

    def look(self) -> Mark:
        return look_at_files(
            [shard.path for shard in self.shards], [shard.offsets for shard in self.shards]
        )

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        starts, lengths = self.find_spans(indices)
        tokens = self.convert(self.stream.read_spans(starts, lengths))
        return {"tokens": Ragged(tokens, lengths)}

    def read_lengths(self, indices: np.ndarray, at: Pass, leaf: str | None) -> np.ndarray:
        return self.find_spans(indices)[1]

    def read_pieces(
        self,
        indices: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        planned: np.ndarray,
        at: Pass,
    ) -> Any:
        firsts, totals = self.find_spans(indices)
        self.check_planned(indices, totals, planned, at)
        firsts += starts
        # Pieces that follow one another in the files are one span.
        begins = np.flatnonzero(np.append(True, firsts[1:] != (firsts + lengths)[:-1]))
        sizes = np.add.reduceat(lengths, begins)
        return {"tokens": self.convert(self.stream.read_spans(firsts[begins], sizes))}

    def convert(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens as int32.

        Args:
            tokens: as a file has them.

        Raises:
            DataError: one is negative, or too large.
        """
        if tokens.size and tokens.dtype not in _SMALL_DTYPES:
            outside = (tokens < 0) | (tokens > _MAX_TOKEN)
            if outside.any():
                raise DataError(
                    f"{self.stages[0]} has the token {tokens[outside][0]}, and tokens are int32, "
                    f"from 0 to {_MAX_TOKEN}: the file holds something else, or is of another dtype"
                )
        return tokens.astype(np.int32)

    def find_spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents begin in all tokens, and their lengths, both int64 `(k,)`.

        Args:
            indices: the numbers of the documents, int64 `(k,)`.
        """
        starts = np.empty(len(indices), np.int64)
        lengths = np.empty(len(indices), np.int64)
        numbers = np.searchsorted(self.documents, indices, side="right") - 1
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            offsets = self.shards[number].offsets
            local = indices[places] - self.documents[number]
            lows = offsets[local]
            starts[places] = self.stream.bounds[number] + lows
            lengths[places] = offsets[local + 1] - lows
        # Not when the file is opened, which would read all of it.
        if (lengths < 0).any():
            index = int(indices[np.argmax(lengths < 0)])
            raise DataError(
                f"{self.trace(index, start_pass(0))} ends before it begins: its offsets are damaged"
            )
        return starts, lengths

    def trace(self, index: int, at: Pass) -> str:
        number = int(np.searchsorted(self.documents, index, side="right")) - 1
        return f"document {index - int(self.documents[number])} of {self.shards[number].path}"


class TokenWindows(Node):
    """Windows over all tokens of files, whatever documents they are of.

    Args:
        parent: the files.
        size: the number of tokens in a window.
        stride: how many tokens a window begins after the one before.
        targets: whether each comes with the tokens that follow its tokens.
    """

    def __init__(self, parent: TokenNode, size: int, stride: int, targets: bool) -> None:
        self.follow(parent, f"window({size}, stride={stride}, targets={targets})")
        self.parent = parent
        self.size = size
        self.stride = stride
        self.targets = targets
        num_read = size + targets
        self.length = max((len(parent.stream) - num_read) // stride + 1, 0)
        if not self.length:
            raise DataError(
                f"{self.stages[0]} has {len(parent.stream)} tokens, and a window "
                f"{'with its targets ' if targets else ''}takes {num_read}"
            )

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        runs = self.parent.stream.read_runs(indices * self.stride, self.size + self.targets)
        convert = self.parent.convert
        if not self.targets:
            return {"tokens": convert(runs)}
        # Two arrays of their own: a view into one of both would be copied on its way to the device.
        return {"tokens": convert(runs[:, :-1]), "targets": convert(runs[:, 1:])}

    def trace(self, index: int, at: Pass) -> str:
        stream, shards = self.parent.stream, self.parent.shards
        number = int(np.searchsorted(stream.bounds, index * self.stride, side="right")) - 1
        return f"window {index} of {self.stages[-1]}, which begins in {shards[number].path},"


def write_tokens(
    path: str | PathLike[str], documents: Iterable[Any], dtype: DTypeLike = np.uint16
) -> Path:
    """Write documents to a file of tokens, and beside it where each begins.

    Args:
        path: of a `.bin` file, complete once it is there. The places are in `NAME.offsets.npy`:
            int64, the start of each document, and the end of the last one.
        documents: sequences of integers; read once.
        dtype: of the file, uint16, uint32 or int32.

    Raises:
        DataError: a document is not one of integers, or a token does not fit the dtype; `Tokens`
            reads int32.
        ConfigurationError: the path does not end with `.bin`.
    """
    target = Path(path)
    kind = _check_dtype("write_tokens", dtype)
    if target.suffix != ".bin":
        # Files that differ in their endings alone would share the one that says where documents
        # begin.
        reason = "would be read as a file of NumPy" if target.suffix == ".npy" else "has no .bin"
        raise ConfigurationError(f"write_tokens: {path} {reason}: name it NAME.bin")
    offsets = [0]
    with write_whole(target) as file:
        for number, document in enumerate(documents):
            tokens = _as_tokens(document, number)
            _check_range(tokens, number, kind)
            file.write(tokens.astype(kind).tobytes())
            offsets.append(offsets[-1] + len(tokens))
        # The tokens last: without the places, they would be one document.
        with write_whole(_get_offsets_path(target)) as offsets_file:
            np.save(offsets_file, np.array(offsets, np.int64))
    return target


def _check_dtype(where: str, dtype: DTypeLike) -> np.dtype:
    kind: np.dtype[Any] = np.dtype(dtype)
    if kind not in (np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int32)):
        raise ConfigurationError(
            f"{where}: dtype is {kind}; it must be uint16, uint32 or int32, as the file has it"
        )
    return kind


def _as_tokens(document: Any, number: int) -> np.ndarray:
    """Return a document as int64 `(tokens,)`."""
    try:
        tokens = np.asarray(document)
    except ValueError as error:
        raise DataError(f"document {number} cannot be an array: {error}") from error
    if tokens.dtype.kind in "iuf" and tokens.ndim != 1:
        raise DataError(
            f"document {number} has the shape {tokens.shape}, and a document is a sequence of "
            "tokens: give a list of documents, [tokens] where there is one"
        )
    tokens = tokens.reshape(-1)
    if not tokens.size:
        return tokens.astype(np.int64)
    if tokens.dtype.kind not in "iu":
        raise DataError(
            f"document {number} holds {tokens.dtype}, such as {tokens[0]!r:.60}, and a token is an "
            "integer of at most 64 bits. Turn text into tokens first, for example with tokenize()"
        )
    return tokens


def _check_range(tokens: np.ndarray, number: int, dtype: np.dtype) -> None:
    """Raise `DataError` if a token is negative, or too large for a file or for `Tokens`."""
    largest = min(int(np.iinfo(dtype.name).max), _MAX_TOKEN)
    outside = (tokens < 0) | (tokens > largest)
    if not outside.any():
        return
    token = int(tokens[outside][0])
    advice = "tokens are int32 when they are read"
    if token < 0:
        advice = "a token is not negative"
    elif token <= _MAX_TOKEN:
        advice = "write_tokens(..., dtype='uint32')"
    raise DataError(
        f"document {number} has the token {token}, and a file of {dtype} holds 0 to {largest}: "
        f"{advice}"
    )


def _map_tokens(path: Path, dtype: np.dtype, has_offsets: bool) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"the file of tokens {path} is missing")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(
                f"the file of tokens {path} is damaged or truncated: {error}"
            ) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"the file of tokens {path} holds {tokens.dtype}{list(tokens.shape)}; it must be "
                "one axis of integers"
            )
    else:
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"the file of tokens {path} has {size} bytes, which are not a whole number of "
                f"{dtype}: it is truncated, or of another dtype"
            )
        tokens = np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
    # A shard of empty documents has a file that says so.
    if not len(tokens) and not (has_offsets and _get_offsets_path(path).exists()):
        raise DataError(f"the file of tokens {path} is empty")
    # Without the class of memory maps, whose slices take five times as long.
    return tokens.view(np.ndarray)


def _load_offsets(path: Path, num_tokens: int) -> np.ndarray:
    """Return where the documents of a file begin, and the end of the last."""
    offsets_path = _get_offsets_path(path)
    if not offsets_path.exists():
        raise DataError(
            f"{offsets_path}, which says where the documents of {path.name} begin, is missing. If "
            "the file is one document, say Tokens(..., has_offsets=False)"
        )
    try:
        offsets = np.load(offsets_path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{offsets_path} is damaged or truncated: {error}") from error
    is_valid = offsets.ndim == 1 and offsets.dtype == np.int64 and len(offsets) > 0
    if not is_valid or offsets[0] != 0:
        raise DataError(f"{offsets_path} must hold int64 numbers of one axis that begin with 0")
    if offsets[-1] != num_tokens:
        raise DataError(
            f"{path} has {num_tokens} tokens, and its documents end at {offsets[-1]} according to "
            f"{offsets_path.name}: one of the files is truncated, or of another dtype"
        )
    return offsets.view(np.ndarray)


def _get_offsets_path(path: Path) -> Path:
    return path.with_suffix(".offsets.npy")
