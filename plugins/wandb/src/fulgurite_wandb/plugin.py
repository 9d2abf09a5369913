"""The plugin: which run it is, and what is written down of it."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import fulgurite as fg
from fulgurite.errors import ConfigurationError

from fulgurite_wandb.backend import Backend, Resumed

Mode = Literal["online", "offline", "disabled"]


@dataclass(eq=False)
class WandbLogger:
    """Sends scalars, tables, media, text and configuration to Weights & Biases, on a thread of its own.

    The step there is the step here. A resumed run goes on with the same id: what is missing between the last step that
    arrived and the checkpoint is taken from `records.jsonl` (of fulgurite-logging), and what arrived already is not
    sent again. Without a key or a network it goes on offline and says so; `wandb sync` sends that later.

    Attributes:
        project: of Weights & Biases.
        mode: `online`, `offline` (files in `directory`, nothing sent) or `disabled`.
        directory: where files go; the run's directory, or without one the present directory.
        best: metrics whose best value is kept in the summary: `{"test/accuracy": "max"}`.
        settings: further arguments of `wandb.init`, such as `entity`, `group`, `name`, `tags`, `notes`.
        timeout: seconds that a connection may take, before it goes on offline.
        required: whether training ends when the sink fails.
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
    _resumed: bool = field(default=False, init=False, repr=False)
    _writer: fg.Writer | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(f"WandbLogger: mode is {self.mode!r}; choose one of {', '.join(get_args(Mode))}")
        if bad := [name for name, how in self.best.items() if how not in ("min", "max")]:
            raise ConfigurationError(f"WandbLogger: best[{bad[0]!r}] is {self.best[bad[0]]!r}; it is 'min' or 'max'")
        if ours := sorted({"project", "mode", "dir", "id", "resume", "config"} & self.settings.keys()):
            raise ConfigurationError(f"WandbLogger sets {ours[0]!r} by itself: leave it out of settings")

    @property
    def id(self) -> str | None:
        """Of the run at Weights & Biases; None before the first fit."""
        return self._id

    @fg.hookimpl
    def open_log(self, run: fg.Run) -> None:
        """Begins the run, or goes on with it."""
        self._writer = None
        if self.mode == "disabled":
            return
        if not self._resumed:
            self._id, self._best = secrets.token_hex(4), {}
        assert self._id is not None
        place = run.directory.path if run.directory is not None else Path()
        folder = Path(self.directory) if self.directory is not None else place
        records = place / "records.jsonl" if self._resumed and run.directory is not None else None
        resumed = Resumed(run.step, records, records.stat().st_size if records and records.is_file() else 0)
        settings = {"project": self.project, "id": self._id, **self.settings}
        backend = Backend(settings, self.mode, folder, self.timeout, resumed if self._resumed else None)
        self._writer, self._resumed = fg.Writer(self.plugin_name, backend), False

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
    def close_log(self) -> None:
        """Waits until everything is handed over."""
        if self._writer is not None:
            self._writer.close()

    @fg.hookimpl
    def host_state(self) -> Any:
        """The run's id and the best values."""
        return {"id": self._id, "best": dict(self._best)}

    @fg.hookimpl
    def restore_host_state(self, state: Any, version: int) -> None:
        """Takes them back."""
        identity = state.get("id")
        if identity is not None and not (isinstance(identity, str) and identity.isalnum()):
            raise ConfigurationError(f"the checkpoint's id of the wandb run is none: {str(identity)[:100]!r}")
        self._id, self._best, self._resumed = identity, dict(state.get("best", {})), identity is not None

    def _put(self, record: fg.Record) -> None:
        if self._writer is not None:
            self._writer.put(record)

    def _is_better(self, key: str, value: float) -> bool:
        best = self._best.get(key, -math.inf if self.best[key] == "max" else math.inf)
        return value > best if self.best[key] == "max" else value < best
