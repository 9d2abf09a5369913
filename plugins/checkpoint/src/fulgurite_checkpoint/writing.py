"""Writing a checkpoint whose arrays have left the device, on a background thread."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError

from fulgurite_checkpoint import format
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.retention import RetentionPolicy, publish


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    """A checkpoint whose arrays have left the device.

    Attributes:
        path: the directory in which it is written.
        texts: the content of small files by name.
        arrays_written: its `result()` waits for the arrays and raises what went wrong.
        get_positions: functions that wait for the positions of loggers, by plugin name.
        commit: without hashes and positions.
        policy: which checkpoints stay.
        assert_locked: raises if another process has taken the run over.
        sync: how processes agree.
    """

    path: Path
    texts: dict[str, str]
    arrays_written: Any
    get_positions: dict[str, Callable[[], Any]]
    commit: Commit
    policy: RetentionPolicy
    assert_locked: Callable[[], None]
    sync: fg.ProcessSync

    def finish(self) -> Commit:
        """Write the rest; `COMMIT` only when all of it is on the disk, and only if this process
        still has the run. Return what it says, without hashes and positions.

        A process that fails reports that to the others, which would otherwise wait for it.
        """
        parts = _run_on_all_processes(self.sync, "checkpoint written", self._write_files)
        _run_on_all_processes(self.sync, "checkpoint complete", partial(self._complete, parts))
        if jax.process_index() == 0:
            try:
                self.policy.apply(self.path.parent.parent)
            except OSError as error:
                warnings.warn(
                    f"an old checkpoint in {self.path.parent} could not be removed: {error}",
                    stacklevel=1,
                )
        return self.commit

    def _write_files(self) -> list[Any]:
        """Write what this process has; return the SHA-256 of its hashes and its loggers'
        positions."""
        self.arrays_written.result()
        if jax.process_index() == 0:
            # Another run may have begun there in the meantime, and save at the same step.
            self.assert_locked()
        for name, text in self.texts.items():
            (self.path / name).write_bytes(text.encode())
        positions = {name: get_position() for name, get_position in self.get_positions.items()}
        sha256 = format.write_hashes(self.path, jax.process_index(), jax.process_count())
        return [sha256, positions]

    def _complete(self, parts: list[list[Any]]) -> None:
        if jax.process_index() != 0:
            return
        hashes = [sha256 for sha256, _ in parts]
        positions = [position for _, position in parts]
        self.assert_locked()
        format.write_commit(
            self.path, replace(self.commit, hashes=hashes, logger_positions=positions)
        )
        publish(self.path, self.commit)


def _run_on_all_processes(
    sync: fg.ProcessSync, name: str, function: Callable[[], Any]
) -> list[Any]:
    """Call a function, and return what it returned on each process.

    Args:
        sync: how processes agree.
        name: of this agreement.
        function: returns a JSON value.

    Raises:
        CheckpointError: it failed on another process.
    """
    value = None
    failure = None
    try:
        value = function()
    except BaseException as error:
        failure = error
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = sync.all_gather(name, [reason, value])
    if failure is not None:
        raise failure
    reasons = [f"process {process}: {text}" for process, (text, _) in enumerate(answers) if text]
    if reasons:
        raise CheckpointError("; ".join(reasons))
    return [value for _, value in answers]
