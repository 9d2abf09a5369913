"""Shards of documents and of their tokens, each written whole or not at all."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import DataError, error_context

_ENCODED_AT_ONCE = 64
"""Documents: the tokenizer uses all cores for them, and their encodings are in memory."""


@dataclass(frozen=True)
class Job:
    """What is tokenized, and how. Worker processes get it once.

    Attributes:
        source: the documents.
        column: of a document that is a dictionary.
        tokenizer: as of `tokenize`.
        end: the token after each document, or None.
        dtype: of the tokens in files, `uint16` or `uint32`.
        shard_size: the number of documents in a shard.
    """

    source: Sequence[Any]
    column: str
    tokenizer: Any
    end: int | None
    dtype: str
    shard_size: int

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return -(-len(self.source) // self.shard_size)

    def list_documents(self, shard: int) -> range:
        """Return the numbers of the documents in a shard.

        Args:
            shard: its number.
        """
        first = shard * self.shard_size
        return range(first, min(first + self.shard_size, len(self.source)))

    def read_document(self, number: int) -> str:
        """Return the text of a document.

        Args:
            number: of the document.

        Raises:
            DataError: it is not a string, nor a dictionary with one.
        """
        document = self.source[number]
        if isinstance(document, dict):
            if self.column not in document:
                raise DataError(
                    f"tokenize: document {number} has no {self.column!r}, and has: "
                    f"{', '.join(map(str, document))}. Give column="
                )
            document = document[self.column]
        if not isinstance(document, str):
            raise DataError(
                f"tokenize: document {number} is a {type(document).__name__}; it must be a string"
            )
        return document


def get_path(folder: Path, shard: int) -> Path:
    """Return where the tokens of a shard are.

    Args:
        folder: of all shards.
        shard: its number.
    """
    return folder / f"shard-{shard:05}.npy"


def hash_documents(job: Job, shard: int) -> str:
    """Return a hash of the documents of a shard.

    Args:
        job: of which it is.
        shard: its number.
    """
    state = hashlib.blake2b(digest_size=16)
    for number in job.list_documents(shard):
        document = job.read_document(number).encode("utf-8", "surrogatepass")
        state.update(len(document).to_bytes(8, "little"))
        state.update(document)
    return state.hexdigest()


def has_shard(folder: Path, shard: int) -> bool:
    """Return whether a shard was written, and its files have the size that they had.

    Args:
        folder: of all shards.
        shard: its number.
    """
    path = get_path(folder, shard)
    try:
        return json.loads(path.with_suffix(".json").read_text()) == _describe_files(path)
    except (OSError, ValueError):
        return False


def write_shard(job: Job, shard: int, folder: Path) -> None:
    """Write the tokens of the documents of a shard, and where each document begins.

    Args:
        job: of which it is.
        shard: its number.
        folder: of all shards.

    Raises:
        DataError: a token does not fit the dtype.
    """
    documents = list(job.list_documents(shard))
    tokens: list[np.ndarray] = []
    for low in range(0, len(documents), _ENCODED_AT_ONCE):
        tokens += _encode(job, documents[low : low + _ENCODED_AT_ONCE])
    lengths = [len(document) for document in tokens]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    path = get_path(folder, shard)
    # The description comes last: a shard without one is written again.
    _write(path.with_suffix(".offsets.npy"), lambda file: np.save(file, offsets))
    _write(path, lambda file: np.save(file, np.concatenate(tokens)))
    text = json.dumps(_describe_files(path))
    _write(path.with_suffix(".json"), lambda file: file.write(text.encode()))


def _encode(job: Job, numbers: Sequence[int]) -> list[np.ndarray]:
    """Return the tokens of some documents, of the dtype of the files."""
    texts = [job.read_document(number) for number in numbers]
    # The fast one leaves out which character each token is of.
    encode = getattr(job.tokenizer, "encode_batch_fast", job.tokenizer.encode_batch)
    with error_context(lambda: f"in documents {numbers[0]} to {numbers[-1]} of tokenize"):
        encodings = encode(texts)
    end = [] if job.end is None else [job.end]
    largest = int(np.iinfo(job.dtype).max)
    results = []
    for number, encoding in zip(numbers, encodings, strict=True):
        tokens = np.array([*encoding.ids, *end], np.int64)
        outside = tokens[(tokens < 0) | (tokens > largest)]
        if len(outside):
            raise DataError(
                f"tokenize: document {number} has the token {outside[0]}, and get_vocab_size() of "
                f"the tokenizer says that they are from 0 to {largest} at most"
            )
        results.append(tokens.astype(job.dtype))
    return results


def _describe_files(path: Path) -> dict[str, int]:
    """Return the sizes of the files of a shard in bytes.

    Raises:
        OSError: one of them is missing.
    """
    offsets_path = path.with_suffix(".offsets.npy")
    return {"tokens": path.stat().st_size, "offsets": offsets_path.stat().st_size}


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file that is there with all of its bytes, or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
