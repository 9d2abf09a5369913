"""The plugin: which run at Weights & Biases it is, and what is sent there."""

import math
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import is_better
from fulgurite.plugins import hide_constructor_frames, redact_text
from fulgurite_logging import BackgroundWriter
from fulgurite_runs import EvaluationDirectory, RunPlugin, expand_path

from fulgurite_wandb.backend import Backend, ResumePoint

EXTRA_TIMEOUT = 30.0
"""Seconds for which wandb may do nothing, besides those that a connection may take."""

INTERRUPTED = 255
"""The exit code by which wandb itself tells of Ctrl-C."""

Mode = Literal["online", "offline", "disabled"]


@dataclass
class _Identity:
    """Which run at Weights & Biases it is.

    Attributes:
        id: of the run; None before there is one.
        best: its best values so far by metric.
    """

    id: str | None = None
    best: dict[str, float] = field(default_factory=dict)


@hide_constructor_frames
@dataclass(eq=False)
class WandbLogger(RunPlugin):
    """Send scalars, tables, media, text and configuration to Weights & Biases, on its own thread.

    The step in wandb is the step of the run. A resumed run keeps its id, and so does a fit from the
    state of an earlier one: what is missing between the last step that arrived and the checkpoint
    is taken from `records.jsonl` (of fulgurite-logging), and what has already arrived is not sent
    again. A run that starts from the checkpoint of another run gets its own id. Without a key or a
    network it continues offline and says so; `wandb sync` sends the records later. wandb shows a
    run that an exception or a signal ended as failed. Other runs of the process, of `wandb.init` in
    the program or of fits at the same time, are left alone.

    Standalone evaluators have a run of their own, of the job type `evaluation`; wandb does not let
    two processes write to one. Its group is the name of the run's directory, as that of the
    training run, so that wandb shows both together.

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
    # That of the fit, and that of the newest fit that began, with which one of its state continues.
    _identity = fg.PerFit(_Identity)
    _newest_identity: _Identity = field(default_factory=_Identity, init=False, repr=False)
    # Whether a checkpoint gave the id, and whether it is one of this run and not of another.
    _has_restored_id = fg.PerFit(bool)
    _is_resumed = fg.PerFit(bool)
    _writer = fg.PerFit[BackgroundWriter | None](lambda: None)
    _backend = fg.PerFit[Backend | None](lambda: None)
    # None in an evaluation by `fulgurite evaluate`.
    _fit = fg.PerFit[fg.Run | None](lambda: None)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(
                f"WandbLogger: mode is {self.mode!r}; choose one of {', '.join(get_args(Mode))}"
            )
        if not isinstance(self.best, Mapping):
            raise ConfigurationError(
                f"WandbLogger: best is {self.best!r}; give 'min' or 'max' by name: "
                'WandbLogger(best={"test/accuracy": "max"})'
            )
        for name, direction in self.best.items():
            if direction not in ("min", "max"):
                raise ConfigurationError(
                    f"WandbLogger: best[{name!r}] is {direction!r}; it is 'min' or 'max'"
                )
        if not (type(self.timeout) in (int, float) and 0 < self.timeout < math.inf):
            raise ConfigurationError(
                f"WandbLogger: timeout is {self.timeout!r}; give a positive number of seconds"
            )
        for name in ("config", "dir", "id", "mode", "project", "resume"):
            if name in self.settings:
                raise ConfigurationError(
                    f"WandbLogger sets {name!r} by itself: leave it out of settings"
                )

    @property
    def id(self) -> str | None:
        """The id of the run at Weights & Biases; None before the first fit."""
        return self._newest_identity.id

    @fg.hookimpl
    def open_logger(self, run: fg.LoggedRun) -> None:
        """Begin the run, or continue with it."""
        if self.mode == "disabled":
            return
        self._fit = run if isinstance(run, fg.Run) else None
        is_new_fit_of_state = run.step == run.step_range.start > 0
        continues_state = is_new_fit_of_state and not self._has_restored_id
        resume_point = None
        if self._is_resumed:
            resume_point = _find_resume_point(run)
        elif continues_state and self._newest_identity.id is not None:
            resume_point = _find_resume_point(run)
            self._identity = self._newest_identity
        else:
            self._identity = _Identity(secrets.token_hex(4))
        identity = self._newest_identity = self._identity
        folder = Path() if self.directory is None else Path(expand_path(self.directory))
        check_lock: Callable[[], None] = _do_nothing
        if self.directory is None and run.run_dir is not None:
            folder = run.run_dir.path
            # Another run may have begun there in the meantime.
            check_lock = partial(run.run_dir.assert_locked, within=1.0)
        settings = {
            "project": self.project,
            "id": identity.id,
            **_describe_run(run),
            **self.settings,
        }
        settings = {name: _redact_setting(value) for name, value in settings.items()}
        self._backend = Backend(settings, self.mode, folder, self.timeout, resume_point, check_lock)
        self._writer = BackgroundWriter(self.plugin_name, self._backend, pre_write=check_lock)
        self._writer.timeout = self.timeout + EXTRA_TIMEOUT

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Send the record, and the best value so far with it."""
        if self._writer is None:
            return
        self._writer.put(record)
        if record.kind != "scalars":
            return
        for name, value in record.values.items():
            key = f"{record.source}/{name}"
            if key in self.best and isinstance(value, int | float) and self._is_better(key, value):
                self._identity.best[key] = value
                self._writer.put(fg.Record("config", "best", record.step, {key: value}))

    @fg.hookimpl(specname="on_exception")
    def mark_failed(self, exception: BaseException) -> None:
        """Note that the run has not finished."""
        if self._backend is not None:
            self._backend.exit_code = 1 if isinstance(exception, Exception) else INTERRUPTED

    @fg.hookimpl
    def close_logger(self) -> None:
        """Wait until everything is handed over. A run that a signal stops has not finished."""
        if self._writer is None or self._backend is None:
            return
        if self._fit is not None and self._fit.stop_reason in ("SIGINT", "SIGTERM"):
            self._backend.exit_code = INTERRUPTED
        if self._backend.is_connected:
            self._writer.timeout = EXTRA_TIMEOUT
        try:
            self._writer.close()
        except TimeoutError as error:
            sync_dir = self._backend.sync_dir
            error.add_note(
                f"what wandb has received is in {sync_dir}, and `wandb sync {sync_dir}` sends it"
            )
            raise

    @fg.hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        """Return the run's id and the best values. wandb cannot be asked to make anything durable,
        and is not waited for."""
        future: Future[Any] = Future()
        future.set_result(asdict(self._identity))
        return future

    @fg.hookimpl
    def rewind_logger(self, position: Any) -> None:
        """Note that the checkpoint is one of this run, which keeps its id and best values.

        It is not called for a run that starts from the checkpoint of another one.
        """
        if not self._has_restored_id:  # a loop of one's own keeps no host states
            self.set_host_state(position, version=1)
        self._is_resumed = self._identity.id is not None

    @fg.hookimpl
    def get_host_state(self) -> Any:
        """Return the run's id and the best values."""
        return asdict(self._identity)

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Restore the run's id and the best values."""
        if not isinstance(state, dict):
            raise ValueError(f"the state of the wandb logger is {state!r:.100}, which is none")
        identity = state.get("id")
        if identity is not None and not (isinstance(identity, str) and identity.isalnum()):
            raise ValueError(f"the id of the wandb run is {identity!r:.100}, which is none")
        best = dict(state.get("best", {}))
        if not all(type(value) in (float, int) for value in best.values()):
            raise ValueError(f"the best values are {best!r:.100}, which should be numbers")
        self._identity = _Identity(identity, best)
        self._has_restored_id = True

    def _is_better(self, key: str, value: float) -> bool:
        return is_better(value, self._identity.best.get(key), self.best[key])


def _do_nothing() -> None:
    pass


def _describe_run(run: fg.LoggedRun) -> dict[str, str]:
    """Return the arguments of `wandb.init` by which a run and its evaluations belong together."""
    if isinstance(run.run_dir, EvaluationDirectory):
        return {"group": run.run_dir.run.path.name, "job_type": "evaluation"}
    if run.run_dir is None:
        return {}
    return {"group": run.run_dir.path.name}


def _find_resume_point(run: fg.LoggedRun) -> ResumePoint:
    if run.run_dir is None:
        return ResumePoint(run.step, None, 0)
    records = run.run_dir.path / "records.jsonl"
    size = records.stat().st_size if records.is_file() else 0
    return ResumePoint(run.step, records, size)


def _redact_setting(value: Any) -> Any:
    """Return an argument of `wandb.init` without secrets, if it is a string, or some, such as tags.
    The names of arguments say nothing of it: `config_exclude_keys` holds none."""
    if isinstance(value, str):
        return redact_text(value)
    return [_redact_setting(item) for item in value] if isinstance(value, list | tuple) else value
