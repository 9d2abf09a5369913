"""What the loggers that write into a run's directory have in common."""

from abc import abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from fulgurite import Record, Run, hookimpl
from fulgurite.errors import ConfigurationError
from fulgurite_runs import RunPlugin

from fulgurite_logging.writer import BackgroundWriter, LogBackend


@dataclass(eq=False)
class FileLogger(RunPlugin):
    """A logger that writes into the run's directory on its own thread, and resumes where its
    checkpoint was.

    A subclass supplies the `backend` that writes. For records other than scalars it adds hooks that
    call `put`.

    Attributes:
        required: whether training ends when the logger fails. Otherwise training continues without
            it, and says so.
    """

    required: bool = False
    plugin_name: ClassVar[str]
    _position: Any = field(default=None, init=False, repr=False)
    _failed: str | None = field(default=None, init=False, repr=False)
    _writer: BackgroundWriter | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def backend(self, run: Run, position: Any) -> LogBackend:
        """A backend that writes to the files in `run.run_dir`, cut back to `position` unless that
        is None."""

    def put(self, record: Record) -> None:
        """Has the record written."""
        if self._writer is not None:
            self._writer.put(record)

    @hookimpl
    def rewind_logger(self, position: Any) -> None:
        """Notes where to go on from; `open_logger` does it, which knows the directory."""
        if isinstance(position, dict) and "failed" in position:
            self._failed, position = str(position["failed"]), position.get("position")
        self._position = position

    @hookimpl
    def open_logger(self, run: Run) -> None:
        """Opens the files and drops what came after the checkpoint that is gone on from."""
        if run.run_dir is None:
            gap = f"{self.plugin_name} writes into the run's directory, and this run has none"
            raise ConfigurationError(
                f"{gap}: give Engine(run_dir='runs/a') or --run runs/a, or leave it out"
            )
        self._writer = None
        # Who was taken for dead for 60 s and wakes up may not write into what another process goes
        # on with.
        held = partial(run.run_dir.assert_locked, within=1.0)
        self._writer = BackgroundWriter(
            self.plugin_name, self.backend(run, self._position), pre_write=held
        )
        self._position = None

    @hookimpl
    def on_fit_start(self, run: Run) -> None:
        """Says that records are missing if the logger had failed before the checkpoint that is gone
        on from."""
        failed, self._failed = self._failed, None
        if failed is not None:
            told = (
                f"{self.plugin_name} failed before the checkpoint of step {run.step}: records are "
                f"missing. {failed}"
            )
            run.log_text(self.plugin_name, {"message": told}, stream="telemetry")

    @hookimpl
    def log_scalars(self, record: Record) -> None:
        """Has the record written."""
        self.put(record)

    @hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        """The position after everything up to `step`, once it is on disk."""
        if self._writer is not None:
            return self._writer.flush()
        future: Future[Any] = Future()
        future.set_result({"failed": "the files could not be opened", "position": self._position})
        return future

    @hookimpl
    def close_logger(self) -> None:
        """Waits until everything is written."""
        if self._writer is not None:
            self._writer.close()
