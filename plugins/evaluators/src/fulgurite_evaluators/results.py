"""The results of standalone evaluators: lines in the run's directory, each there once."""

import errno
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs import (
    RunDirectory,
    check_in_place,
    dumps,
    hash_commit,
    list_superseded,
    loads,
    sync_folder,
)

FOLDER = "evaluations"
_LOGGERS = "loggers"
# A longer line was not written by an evaluator.
_LONGEST_LINE = 16 * 2**20


@dataclass(frozen=True)
class EvaluationRecord:
    """A result of a standalone evaluator.

    Example:
        from fulgurite_evaluators import read_results

        for record in read_results("runs/digits"):
            print(record.evaluator, record.step, record.metrics)

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
        """What is evaluated once: an evaluator, a step and a checkpoint of that step."""
        return self.evaluator, self.step, self.commit


class ResultWriter:
    """Appends to the results of one group, in `evaluations/GROUP.jsonl` of a run.

    Only the holder of the group's lock appends. A line in which a process was killed is not a
    result: it is cut off here, and the evaluation is done again.

    Args:
        run: the directory of the run.
        group: of evaluators.

    Attributes:
        done: the keys of the results in the file.
        last_step: of the last result; 0 without one.
        logger_state: where the loggers were after the last result, as it was passed to `append`.
    """

    def __init__(self, run: RunDirectory, group: str) -> None:
        self._path = run.path / FOLDER / f"{group}.jsonl"
        records, num_bytes = _read_records(self._path)
        self.done = {record.key for record, _ in records}
        self.last_step = records[-1][0].step if records else 0
        self.logger_state = records[-1][1] if records else {}
        # 0o644 like any file; no link is followed out of the run, and no pipe is waited for.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(self._path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise CheckpointError(f"{self._path} is not a regular file: remove it")
            os.ftruncate(self._file, num_bytes)
            os.fsync(self._file)
            sync_folder(self._path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: EvaluationRecord, logger_state: dict[str, Any]) -> None:
        """Write a result durably.

        Args:
            record: the result.
            logger_state: where the loggers are, which already have it.

        Raises:
            CheckpointError: it could not be written, or not be read again; nothing of it is left.
        """
        data = f"{dumps({**asdict(record), _LOGGERS: logger_state})}\n".encode()
        check_in_place(self._file, self._path)
        if len(data) > _LONGEST_LINE:
            raise CheckpointError(
                f"{self._path}: the result of {record.evaluator!r} at step {record.step} has "
                f"{len(data):,} bytes, and {_LONGEST_LINE:,} are the most that can be read again: "
                "return smaller metrics"
            )
        try:
            self._append(data)
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: the result of {record.evaluator!r} at step {record.step} could not "
                f"be written: {error}. Make room, and start this again; nothing is evaluated twice"
            ) from error
        self.done.add(record.key)

    def _append(self, data: bytes) -> None:
        num_written = os.write(self._file, data)
        if num_written != len(data):
            os.ftruncate(self._file, os.fstat(self._file).st_size - num_written)
            raise OSError(errno.ENOSPC, f"only {num_written} of {len(data)} bytes were written")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_results(run: str | os.PathLike[str] | RunDirectory) -> list[EvaluationRecord]:
    """Return the newest result of each standalone evaluator for each step of a run, sorted by
    evaluator and step.

    If a step was evaluated again on a different checkpoint, the newer result counts; results of
    checkpoints that a later attempt set aside do not. May be called while the run and its
    evaluators are running.

    Args:
        run: the directory of the run.

    Raises:
        CheckpointError: a file of results was not written by an evaluator.
    """
    if not isinstance(run, RunDirectory):
        run = RunDirectory(run)
    set_aside = {hash_commit(checkpoint) for checkpoint in list_superseded(run.path)}
    # Training may have come to the very same checkpoint again.
    set_aside -= {hash_commit(checkpoint) for _, checkpoint in run.list_checkpoints()}
    newest: dict[tuple[str, int], EvaluationRecord] = {}
    for path in sorted((run.path / FOLDER).glob("*.jsonl")):
        records, _ = _read_records(path)
        for record, _ in records:
            if record.commit not in set_aside:
                newest[record.evaluator, record.step] = record
    return [newest[key] for key in sorted(newest)]


def _read_records(path: Path) -> tuple[list[tuple[EvaluationRecord, dict[str, Any]]], int]:
    """Return the results in a file with the states of the loggers after each, and how many of its
    bytes are whole lines."""
    if not path.is_file() or path.is_symlink():
        return [], 0
    num_bytes = 0
    records = []
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                break
            try:
                records.append(_parse_record(line))
            except (TypeError, ValueError, LookupError) as error:
                raise CheckpointError(
                    f"{path}, line {len(records) + 1} is not a result of an evaluator: {error}; "
                    "remove it"
                ) from error
            num_bytes += len(line)
    return records, num_bytes


def _parse_record(line: bytes) -> tuple[EvaluationRecord, dict[str, Any]]:
    """Return a result and the states of the loggers after it.

    Raises:
        TypeError, ValueError, LookupError: the line is something else.
    """
    if not line.endswith(b"\n"):
        raise ValueError(f"it is longer than {_LONGEST_LINE:,} bytes")
    values = loads(line)
    if not isinstance(values, dict):
        raise TypeError("it is not a JSON object")
    logger_state = values.pop(_LOGGERS, {})
    record = EvaluationRecord(**values)
    for name, expected in (("evaluator", str), ("step", int), ("commit", str), ("metrics", dict)):
        if type(values[name]) is not expected:
            raise TypeError(f"{name} is {values[name]!r:.100}")
    if not isinstance(logger_state, dict):
        raise TypeError(f"{_LOGGERS} is {logger_state!r:.100}")
    return record, logger_state
