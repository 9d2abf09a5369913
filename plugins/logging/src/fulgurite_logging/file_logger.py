"""The base class of loggers that write into the run's directory."""

from abc import abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fulgurite import LoggedRun, PerFit, Record, Run, hookimpl
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import EngineView, RecordKind
from fulgurite_runs import RunPlugin, get_run_directory

from fulgurite_logging.writer import BackgroundWriter, LogBackend


@dataclass(eq=False)
class FileLogger(RunPlugin):
    """A logger that writes into the run's directory on its own thread, and resumes where its
    checkpoint was.

    A subclass defines `open_backend`, and `kinds` for records other than scalars.

    Example:
        from fulgurite_logging import FileLogger, JSONLBackend


        class MyLogger(FileLogger):
            plugin_name = "mine"

            def open_backend(self, run, position):
                return JSONLBackend(run.run_dir.path, position)  # or a `LogBackend` of your own

    Attributes:
        required: whether training ends when the logger fails. Otherwise training continues without
            it, and says so.
        queue_size: how many records may wait for the backend; training waits while there are more.
        kinds: of the records that are written.
    """

    required: bool = False
    queue_size: ClassVar[int] = 1000
    kinds: ClassVar[tuple[RecordKind, ...]] = ("scalars",)
    _position = PerFit[Any](lambda: None)
    _earlier_failure = PerFit[str | None](lambda: None)
    _writer = PerFit[BackgroundWriter | None](lambda: None)

    @abstractmethod
    def open_backend(self, run: LoggedRun, position: Any) -> LogBackend:
        """Return a backend that writes to files in `run.run_dir`.

        Args:
            run: the run.
            position: what the backend's `get_position` returned when the checkpoint was saved that
                the run resumes from: the files must be cut back to it. None if there is none.
        """

    def put(self, record: Record) -> None:
        """Queue a record for writing."""
        if self._writer is not None:
            self._writer.put(record)

    def check_position(self, folder: Path, position: Any, step: int | None) -> None:
        """Raise `CheckpointError` if the files cannot be cut back to a position; change nothing.

        Args:
            folder: the run's directory.
            position: what the backend's `get_position` returned, read from a checkpoint.
            step: up to which everything was written; None if the logger had failed before. Then
                an error means that it keeps what is there.
        """

    @hookimpl
    def check_logger_position(self, position: Any, step: int, engine: EngineView) -> None:
        """Check the position of the logger, unless it had failed: perhaps because its files were
        deleted, and records are missing in any case."""
        directory = get_run_directory(engine)
        had_failed = isinstance(position, dict) and "failed" in position
        if directory is not None and position is not None and not had_failed:
            self.check_position(directory.path, position, step)

    @hookimpl
    def rewind_logger(self, position: Any) -> None:
        """Note where to continue; `open_logger`, which knows the directory, cuts the files back."""
        if isinstance(position, dict) and "failed" in position:
            self._earlier_failure = str(position["failed"])
            position = position.get("position")
        self._position = position

    @hookimpl
    def open_logger(self, run: LoggedRun) -> None:
        """Open the files and drop what came after the checkpoint that the run resumes from."""
        if run.run_dir is None:
            raise ConfigurationError(
                f"{self.plugin_name} writes into the run's directory, and this run has none: give "
                "Engine(run_dir='runs/a') or --run runs/a, or leave it out"
            )
        # A process that was suspended for 60 s counts as dead. When it wakes up it must not write
        # into the files that another process has taken over.
        check_lock = partial(run.run_dir.assert_locked, within=1.0)
        if self._earlier_failure is not None and not self._can_rewind(run.run_dir.path):
            self._position = None
        backend = self.open_backend(run, self._position)
        try:
            self._writer = BackgroundWriter(
                self.plugin_name, backend, size=self.queue_size, pre_write=check_lock
            )
        except BaseException:
            backend.close()
            raise

    @hookimpl
    def on_fit_start(self, run: Run) -> None:
        """Say that records are missing if the logger had failed before the checkpoint that the run
        resumes from."""
        if self._earlier_failure is not None:
            message = (
                f"{self.plugin_name} failed before the checkpoint of step {run.step}: records are "
                f"missing. {self._earlier_failure}"
            )
            run.notify(self.plugin_name, message)

    @hookimpl
    def log_record(self, record: Record) -> None:
        """Write the record, if it is of the kinds that this logger writes."""
        if record.kind in self.kinds:
            self.put(record)

    @hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        """Return the position after everything up to `step`, as a future that is done once that is
        on disk."""
        if self._writer is not None:
            return self._writer.flush()
        future: Future[Any] = Future()
        future.set_result({"failed": "the files could not be opened", "position": self._position})
        return future

    @hookimpl
    def close_logger(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.close()

    def _can_rewind(self, folder: Path) -> bool:
        """Return whether the files of a logger that had failed are still those that it had."""
        try:
            self.check_position(folder, self._position, None)
        except CheckpointError:
            return False
        return True
