"""The results of standalone evaluators: in the run's directory, one line each, each there once."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs import RunDirectory
from fulgurite_runs.directory import sync_folder
from fulgurite_runs.json_codec import dumps, loads

FOLDER = "evaluations"


@dataclass(frozen=True)
class EvaluationRecord:
    """A result of a standalone evaluator.

    Attributes:
        evaluator: its name.
        step: of the checkpoint.
        commit: the SHA-256 of the checkpoint's `COMMIT`, in hexadecimal; a different one means a
            different checkpoint of that step.
        metrics: by name.
    """

    evaluator: str
    step: int
    commit: str
    metrics: dict[str, Any]

    @property
    def key(self) -> tuple[str, int, str]:
        """What is evaluated once."""
        return self.evaluator, self.step, self.commit


class Results:
    """The results of one group, in `evaluations/GROUP.jsonl` of a run; only the holder of the
    group's lock appends.

    A line that a process was killed in is no result: it is cut off here, and what it said is found
    again.
    """

    def __init__(self, run: RunDirectory, group: str) -> None:
        self._path = run.path / FOLDER / f"{group}.jsonl"
        found, whole = _read(self._path)
        self.done = {one.key for one in found}
        # 0o644 like any file; no link is followed out of the run.
        self._file = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
        )
        os.ftruncate(self._file, whole)
        os.fsync(self._file)
        sync_folder(self._path.parent)

    def append(self, one: EvaluationRecord) -> None:
        """Writes a result down, durably; raises `OSError` if that fails."""
        line = dumps(
            {
                "evaluator": one.evaluator,
                "step": one.step,
                "commit": one.commit,
                "metrics": one.metrics,
            }
        )
        data = f"{line}\n".encode()
        if (written := os.write(self._file, data)) != len(data):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(
                f"{self._path}: only {written} of {len(data)} bytes of a result could be written"
            )
        os.fsync(self._file)
        self.done.add(one.key)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def read_results(run: str | os.PathLike[str] | RunDirectory) -> list[EvaluationRecord]:
    """The newest result of each standalone evaluator for each step of a run, by evaluator and step.

    If a step was evaluated again on a different checkpoint, the newer result counts; results of
    checkpoints that a later attempt set aside do not. May be called while the run and its
    evaluators are running.

    Raises:
        CheckpointError: a file of results that was not written by an evaluator.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    found = [one for file in sorted((run.path / FOLDER).glob("*.jsonl")) for one in _read(file)[0]]
    aside = {commit_of(checkpoint) for checkpoint in run.get_folder("superseded").glob("*/step-*")}
    aside -= {commit_of(checkpoint) for _, checkpoint in run.list_checkpoints()}
    newest = {(one.evaluator, one.step): one for one in found if one.commit not in aside}
    return [newest[key] for key in sorted(newest)]


def commit_of(checkpoint: Path) -> str | None:
    """The SHA-256 of a checkpoint's `COMMIT`, in hexadecimal; None if it is not there any more."""
    try:
        return hashlib.sha256((checkpoint / "COMMIT").read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read(path: Path) -> tuple[list[EvaluationRecord], int]:
    """The results in a file, and how many bytes of it are whole lines."""
    data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    whole = data.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            one = EvaluationRecord(**loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}, line {number} is no result of an evaluator: {error}; remove it"
            ) from error
        found.append(one)
    return found, whole
