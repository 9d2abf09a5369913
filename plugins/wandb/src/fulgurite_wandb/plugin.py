"""The plugin: which run it is, and what is written down of it."""

import math
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from fulgurite_logging import BackgroundWriter
from fulgurite_runs import RunPlugin

from fulgurite_wandb.backend import Backend, Resumed

PATIENCE = 30.0
"""Seconds for which wandb may do nothing beyond what a connection may take."""

Mode = Literal["online", "offline", "disabled"]


@dataclass(eq=False)
class WandbLogger(RunPlugin):
    """Sends scalars, tables, media, text and configuration to Weights & Biases, on its own thread.

    The step in wandb is the step of the run. A resumed run keeps its id, and so does a fit from the
    state of the one
    before: what is missing between the last step that arrived and the checkpoint is taken from
    `records.jsonl` (of fulgurite-logging), and what has already arrived is not sent again. A run
    that starts from the checkpoint of another run gets its own id. Without a key or a network it
    continues offline and says so; `wandb sync` sends the records later.

    Example:
        from fulgurite_wandb import WandbLogger

        logger = WandbLogger("digits", mode="offline", best={"test/accuracy": "max"})
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=[logger])

    Attributes:
        project: the project at Weights & Biases.
        mode: `online`, `offline` (files in `directory`, nothing sent) or `disabled`.
        directory: where files go; the run's directory, or without one the current directory.
        best: metrics whose best value is kept in the summary: `{"test/accuracy": "max"}`.
        settings: further arguments of `wandb.init`, such as `entity`, `group`, `name`, `tags`,
            `notes`.
        timeout: seconds that a connection may take before the run continues offline.
        required: whether training ends when the logger fails.
    """

    project: str
    mode: Mode = "online"
    directory: str | Path | None = None
    best: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 20.0
    required: bool = False
    plugin_name = "wandb"
    after = ("jsonl",)  # its file is cut back to the checkpoint before it is read
    _id: str | None = field(default=None, init=False, repr=False)
    _best: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _restored: bool = field(default=False, init=False, repr=False)
    _resumed: bool = field(default=False, init=False, repr=False)
    _writer: BackgroundWriter | None = field(default=None, init=False, repr=False)
    _backend: Backend | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(
                f"WandbLogger: mode is {self.mode!r}; choose one of {', '.join(get_args(Mode))}"
            )
        if not isinstance(self.best, Mapping):
            example = 'WandbLogger(best={"test/accuracy": "max"})'
            raise ConfigurationError(
                f"WandbLogger: best is {self.best!r}; give 'min' or 'max' by name: {example}"
            )
        if not (type(self.timeout) in (int, float) and 0 < self.timeout < math.inf):
            raise ConfigurationError(
                f"WandbLogger: timeout is {self.timeout!r}; give a positive number of seconds"
            )
        if bad := [name for name, how in self.best.items() if how not in ("min", "max")]:
            raise ConfigurationError(
                f"WandbLogger: best[{bad[0]!r}] is {self.best[bad[0]]!r}; it is 'min' or 'max'"
            )
        if ours := sorted(
            {"project", "mode", "dir", "id", "resume", "config"} & self.settings.keys()
        ):
            raise ConfigurationError(
                f"WandbLogger sets {ours[0]!r} by itself: leave it out of settings"
            )

    @property
    def id(self) -> str | None:
        """Of the run at Weights & Biases; None before the first fit."""
        return self._id

    @fg.hookimpl
    def open_logger(self, run: fg.Run) -> None:
        """Begins the run, or goes on with it."""
        self._writer = None
        if self.mode == "disabled":
            return
        # It goes on where its checkpoint was, or from the state that its former fit left.
        from_state = (
            run.step == run.step_range.start > 0 and self._id is not None and not self._restored
        )
        goes_on = self._resumed or from_state
        if not goes_on:
            self._id, self._best = secrets.token_hex(4), {}
        place = run.run_dir.path if run.run_dir is not None else Path()
        folder = Path(self.directory) if self.directory is not None else place
        records = place / "records.jsonl" if goes_on and run.run_dir is not None else None
        resumed = Resumed(
            run.step, records, records.stat().st_size if records and records.is_file() else 0
        )
        settings = {"project": self.project, "id": self._id, **self.settings}
        backend = Backend(settings, self.mode, folder, self.timeout, resumed if goes_on else None)
        self._writer, self._backend = BackgroundWriter(self.plugin_name, backend), backend
        self._writer.timeout = self.timeout + PATIENCE
        self._resumed = self._restored = False

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        """Has the record sent, and the best value so far with it."""
        if self._writer is None:
            return
        self._writer.put(record)
        for name, value in record.values.items():
            key = f"{record.source}/{name}"
            if key in self.best and isinstance(value, int | float) and self._is_better(key, value):
                self._best[key] = value
                self._writer.put(fg.Record("config", "best", record.step, {key: value}))

    @fg.hookimpl
    def log_media(self, record: fg.Record) -> None:
        """Has the record sent."""
        self._put(record)

    @fg.hookimpl
    def log_text(self, record: fg.Record) -> None:
        """Has the record sent."""
        self._put(record)

    @fg.hookimpl
    def log_config(self, record: fg.Record) -> None:
        """Has the record sent."""
        self._put(record)

    @fg.hookimpl
    def close_logger(self) -> None:
        """Waits until everything is handed over."""
        if self._writer is None or self._backend is None:
            return
        if self._backend.connected:
            self._writer.timeout = PATIENCE
        try:
            self._writer.close()
        except TimeoutError as error:
            place = self._backend.place
            error.add_note(f"what wandb was given is in {place}, and `wandb sync {place}` sends it")
            raise

    @fg.hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        """The run's id. wandb cannot be asked to make anything durable, and is not waited for."""
        future: Future[Any] = Future()
        future.set_result(self._id)
        return future

    @fg.hookimpl
    def rewind_logger(self, position: Any) -> None:
        """The checkpoint is one of this run, whose id and best values are gone on with; another run
        has its own."""
        self._resumed = self._restored and self._id is not None

    @fg.hookimpl
    def get_host_state(self) -> Any:
        """The run's id and the best values."""
        return {"id": self._id, "best": dict(self._best)}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Takes them back."""
        identity = state.get("id")
        if identity is not None and not (isinstance(identity, str) and identity.isalnum()):
            raise ConfigurationError(
                f"the checkpoint's id of the wandb run is none: {str(identity)[:100]!r}"
            )
        self._id, self._best, self._restored = identity, dict(state.get("best", {})), True

    def _put(self, record: fg.Record) -> None:
        if self._writer is not None:
            self._writer.put(record)

    def _is_better(self, key: str, value: float) -> bool:
        best = self._best.get(key, -math.inf if self.best[key] == "max" else math.inf)
        return value > best if self.best[key] == "max" else value < best
