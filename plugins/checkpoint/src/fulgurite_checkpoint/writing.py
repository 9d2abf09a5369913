"""Writing a checkpoint whose arrays have left the device, on a background thread."""

import os
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError
from fulgurite.plugins import Activity, Wait, WaitAbandoned, redact_registered
from fulgurite_runs import start_thread

from fulgurite_checkpoint import format
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.retention import Leftovers, RetentionPolicy, publish

MEASURE_INTERVAL = 1.0
"""Seconds between two looks at how far a checkpoint has got that somebody waits for."""


@dataclass(eq=False)
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
        num_bytes: of its arrays; compressed, they take less on the disk.
        awaited: what is waited for at present, for messages.
        leftovers: older checkpoints that could not be removed.
    """

    path: Path
    texts: dict[str, str]
    arrays_written: Any
    get_positions: dict[str, Callable[[], Any]]
    commit: Commit
    policy: RetentionPolicy
    assert_locked: Callable[[], None]
    sync: fg.ProcessSync
    num_bytes: int
    awaited: str = "its arrays"
    leftovers: Leftovers = field(default_factory=dict, init=False)
    _written: Future[Commit] = field(default_factory=Future, init=False)
    _is_abandoned: bool = field(default=False, init=False)

    def start(self) -> None:
        """Begin to write the rest on a thread of its own."""
        self._written = start_thread("fulgurite checkpoint", self.finish)

    def wait_for_commit(self, activity: Activity | None = None) -> Commit:
        """Return what it says when it is complete, or raise what went wrong.

        Args:
            activity: where bytes are counted that are on the disk.

        Raises:
            WaitAbandoned: training is to stop, and nothing has happened for too long.
        """
        try:
            self._wait(activity)
        except WaitAbandoned:
            self._is_abandoned = True
            raise
        return self._written.result()

    def _wait(self, activity: Activity | None) -> None:
        progress = None
        # A write that continues is not a wait for what may never come, however long it takes.
        while not self._is_written_soon():
            with Wait(f"the checkpoint of step {self.commit.step} ({self.awaited})"):
                while not self._written.done():
                    # On a disk that hangs, to look at a file hangs as well.
                    measuring = start_thread("fulgurite progress", self._measure_progress)
                    awaited: list[Future[Any]] = [self._written, measuring]
                    futures.wait(awaited, return_when=futures.FIRST_COMPLETED)
                    if measuring.done() and measuring.result() != progress:
                        progress = measuring.result()
                        if activity is not None:
                            activity.done = min(progress.num_bytes, self.num_bytes)
                        break
                    self._is_written_soon()

    def _is_written_soon(self) -> bool:
        futures.wait([self._written], timeout=MEASURE_INTERVAL)
        return self._written.done()

    def finish(self) -> Commit:
        """Write the rest; `COMMIT` only when all of it is on the disk, and only if this process
        still has the run. Return what it says, without hashes and positions.

        A process that fails reports that to the others, which would otherwise wait for it.
        """
        parts = _run_on_all_processes(self.sync, "checkpoint written", self._write_files)
        _run_on_all_processes(self.sync, "checkpoint complete", partial(self._complete, parts))
        if jax.process_index() == 0:
            self._go_on_with("the removal of older ones")
            self.leftovers |= self.policy.apply(self.path.parent.parent)
        return self.commit

    def _write_files(self) -> list[Any]:
        """Write what this process has; return the SHA-256 of its hashes and its loggers'
        positions."""
        self.arrays_written.result()
        if jax.process_index() == 0:
            # Another run may have begun there in the meantime, and save at the same step.
            self.assert_locked()
        for name, text in self.texts.items():
            self._go_on_with(name)
            file = self.path / name
            # States and paths stay as they are, or a run could not continue with them.
            if isinstance(file, Path) and redact_registered(text) != text:
                file.touch()
                file.chmod(0o600)
                if name == "index.json":  # the arrays are called by these paths, too
                    (self.path / "arrays").chmod(0o700)
            file.write_bytes(text.encode())
        positions = {}
        for name, get_position in self.get_positions.items():
            self._go_on_with(f"logger {name!r}")
            positions[name] = get_position()
        sha256 = format.write_hashes(
            self.path, jax.process_index(), jax.process_count(), self._go_on_with
        )
        return [sha256, positions]

    def _go_on_with(self, what: str) -> None:
        """Note what is waited for next; raise `CheckpointError` if nobody waits any more, since the
        lock of the run may be another's by now."""
        if self._is_abandoned:
            raise CheckpointError(f"the checkpoint of step {self.commit.step} was abandoned")
        self.awaited = what

    def _measure_progress(self) -> "_Progress":
        """Return something that is another thing while the checkpoint is being written."""
        if isinstance(self.path, Path):
            return _Progress(self.awaited, _measure_size(self.path))
        # An object appears when all of it is there, and its client has timeouts of its own.
        is_unseen = not self.awaited.startswith("logger ")
        return _Progress(self.awaited, 0, time.monotonic() if is_unseen else 0.0)

    def _complete(self, parts: list[list[Any]]) -> None:
        if jax.process_index() != 0:
            return
        hashes = [sha256 for sha256, _ in parts]
        positions = [position for _, position in parts]
        self._go_on_with("COMMIT")
        self.assert_locked()
        format.write_commit(
            self.path, replace(self.commit, hashes=hashes, logger_positions=positions)
        )
        self.leftovers |= publish(self.path, self.commit)


class _Progress(NamedTuple):
    """How far a checkpoint has got.

    Attributes:
        awaited: what is waited for.
        num_bytes: that are on the disk.
        time: when this was, where what is there cannot be seen.
    """

    awaited: str
    num_bytes: int
    time: float = 0.0


def _measure_size(folder: Path) -> int:
    """Return the number of bytes in the files below a folder, as far as they are there."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was renamed in the meantime
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


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
