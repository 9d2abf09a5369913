"""Tokenizing once, into files that are found again by what they were made of."""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from fulgurite.errors import ConfigurationError, DataError, as_int, check_positive_int
from tqdm import tqdm

from fulgurite_data.locking import hold_lock
from fulgurite_data.text.shards import Job, get_path, has_shard, hash_documents, write_shard

_FORMAT = 1
"""Changes where the same documents and settings make other files."""


class Tokenizer(Protocol):
    """What turns text into tokens: a `tokenizers.Tokenizer`, or an object like it."""

    def encode_batch(self, input: list[str]) -> Sequence[Any]:
        """Return an object with a list `ids` for each text."""
        ...

    def get_vocab_size(self) -> int:
        """Return how many tokens there are."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the number of a token, or None."""
        ...

    def to_str(self) -> str:
        """Return all that decides which tokens a text has; part of the key of the cache."""
        ...


def tokenize(
    source: Sequence[Any],
    tokenizer: Tokenizer,
    out: str | PathLike[str],
    *,
    end: str | None = None,
    column: str = "text",
    fingerprint: str | None = None,
    shard_size: int = 1000,
    processes: int = 0,
    progress: bool = True,
) -> list[Path]:
    """Return files of tokens of documents, for `Tokens`; write those that are missing.

    The files are in a folder of `out` whose name follows from the documents, the tokenizer and the
    settings, so that other documents or settings never get these tokens. Each shard is written
    whole or not at all: after a crash, what is missing is one shard for each process. One process
    of a machine writes at a time, and others wait for it.

    Example:
        from fulgurite_data import Tokens, tokenize
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(["Once upon a time"], special_tokens=["<end>"])
        files = tokenize(["Once upon a time", "The end"], tokenizer, "cache", end="<end>")
        dataset = Tokens(files)

    Args:
        source: a sequence of strings, such as `TextFiles`, or of dictionaries with one.
        tokenizer: a `tokenizers.Tokenizer`, or an object with four methods of it.
        out: the folder of the cache.
        end: a token that is put after each document. A document that holds it literally is
            encoded as the tokenizer does, which finds its special tokens in text too.
        column: the key of the string, where documents are dictionaries.
        fingerprint: stands for the content of the source, where reading all of it to see whether it
            changed takes too long; it must change with the content.
        shard_size: documents in a shard.
        processes: how many tokenize. 0 for this one, in which a `tokenizers.Tokenizer` uses all
            cores; more if reading the documents is slow, or the tokenizer is Python. They are
            spawned: the source must be importable, and the program needs
            `if __name__ == "__main__":`.
        progress: whether to show a bar, if the standard error is a terminal.

    Raises:
        ConfigurationError: the tokenizer truncates or pads, or has no such token.
        DataError: a document is not a string, or a process died.
    """
    shard_size, processes = as_int(shard_size), as_int(processes)
    check_positive_int(shard_size, "tokenize: shard_size")
    if type(processes) is not int or processes < 0:
        raise ConfigurationError(
            f"tokenize: processes is {processes!r}; it must be 0 or a positive integer"
        )
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if not is_sequence or isinstance(source, str | bytes):
        raise ConfigurationError(
            f"tokenize: the source is a {type(source).__name__}; it must be a sequence of "
            "documents, with __len__ and __getitem__: TextFiles(folder), or list(documents)"
        )
    if not len(source):
        raise DataError("tokenize: the source has no document")
    _check_whole(tokenizer)
    end_id = _find_token(tokenizer, end)
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    job = Job(source, column, tokenizer, end_id, dtype, shard_size)
    shards = range(job.num_shards)
    with _Workers(job, processes, progress) as workers:
        if fingerprint is not None:
            # Which column and how many documents that is of is not said by it.
            fingerprint = json.dumps([fingerprint, column, len(source)])
        else:
            hashes = workers.run("reading", hash_documents, shards)
            fingerprint = " ".join(hashes[shard] for shard in shards)
        folder = Path(out) / _make_key(job, fingerprint)
        with hold_lock(folder):
            missing = [shard for shard in shards if not has_shard(folder, shard)]
            workers.run("tokenizing", write_shard, missing, folder)
    return [get_path(folder, shard) for shard in shards]


class _Workers:
    """Does the work for shards, in this process or in others.

    Args:
        job: what is tokenized.
        processes: how many others; 0 for none.
        progress: whether to show a bar.
    """

    def __init__(self, job: Job, processes: int, progress: bool) -> None:
        self._job = job
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            # Not forked: jax has threads of its own.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context, _start_worker, (job,))

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(
        self, title: str, function: Callable[..., Any], shards: Sequence[int], *arguments: Any
    ) -> dict[int, Any]:
        """Return what a function returns for each shard.

        Args:
            title: of the bar.
            function: called with the job, the number of the shard and `arguments`.
            shards: the numbers.
            arguments: for the function.

        Raises:
            DataError: a process died.
        """
        results = {}
        total = sum(len(self._job.list_documents(shard)) for shard in shards)
        # With None, tqdm shows a bar only where the standard error is a terminal.
        disable = None if self._progress else True
        with tqdm(total=total, desc=title, unit=" documents", disable=disable) as bar:
            for shard, result in self._iter_results(function, shards, arguments):
                results[shard] = result
                bar.update(len(self._job.list_documents(shard)))
        return results

    def _iter_results(
        self, function: Callable[..., Any], shards: Sequence[int], arguments: tuple[Any, ...]
    ) -> Iterator[tuple[int, Any]]:
        if self._pool is None:
            for shard in shards:
                yield shard, function(self._job, shard, *arguments)
            return
        futures = {self._pool.submit(_call, function, shard, *arguments): shard for shard in shards}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenizes has died, as one does that is killed or has no memory "
                "left. The shards that were written are kept: call tokenize again, with fewer "
                "processes or a smaller shard_size"
            ) from error


_worker_job: Job | None = None


def _start_worker(job: Job) -> None:
    global _worker_job
    # Each process tokenizes by itself, and not with as many threads as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_job = job


def _call(function: Callable[..., Any], shard: int, *arguments: Any) -> Any:
    return function(_worker_job, shard, *arguments)


def _check_whole(tokenizer: Any) -> None:
    """Raise `ConfigurationError` if a tokenizer would cut documents off, or fill them up."""
    for setting in ("truncation", "padding"):
        if getattr(tokenizer, setting, None) is not None:
            raise ConfigurationError(
                f"tokenize: the tokenizer has {setting}, which changes documents as they are "
                f"stored: call tokenizer.no_{setting}() first. Pack or pad where they are read"
            )


def _find_token(tokenizer: Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ConfigurationError(
            f"tokenize: end is {token!r}, which the tokenizer does not know: train it with this "
            "special token, or give one that it has"
        )
    return number


def _make_key(job: Job, fingerprint: str) -> str:
    settings = [_FORMAT, job.end, job.dtype, job.shard_size, job.tokenizer.to_str(), fingerprint]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
