"""The plugin: which run of MLflow it is, and what is sent there."""

import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import hide_constructor_frames, redact_text, redact_value
from fulgurite_logging import FileLogger, LogBackend
from fulgurite_runs import EvaluationDirectory

from fulgurite_mlflow.backend import Backend, RunIdentity, RunNote, forget_run, read_note
from fulgurite_mlflow.values import FOLDER, build_uri, clean_name, escape_surrogates


@hide_constructor_frames
@dataclass(eq=False)
class MLflowLogger(FileLogger):
    """Send metrics, parameters, media and strings to MLflow, on its own thread.

    Metrics are named `SOURCE/NAME`, such as `train/loss`; what MLflow refuses in a name, such as
    brackets, becomes `_`. The step in MLflow is the step of the run. A resumed run continues with
    the same run of MLflow, whose id is in `mlflow.json` of the run's directory and in each
    checkpoint: what has already arrived is not sent again, and exact metrics that have not are sent
    from the history of the checkpoint, as far as it goes back. A run that starts over gets a new
    run of MLflow, and one that it replaces in the directory is marked as killed.

    Neither training nor a checkpoint waits for the server. If it cannot be reached, or does not
    answer, training continues without the logger and says so once. With a `JSONLLogger` beside it
    nothing but media is lost: `fulgurite mlflow RUN` sends what MLflow lacks.

    Example:
        from fulgurite_mlflow import MLflowLogger

        logger = MLflowLogger("digits", tracking_uri="http://localhost:5000")
        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=[logger])

    Attributes:
        experiment: the name of the experiment at MLflow.
        tracking_uri: the server or the folder of MLflow, or a database such as
            `sqlite:///runs/mlflow.db`, for which `fulgurite-mlflow[sqlite]` must be installed; the
            environment variable `MLFLOW_TRACKING_URI` if None, and without that the folder `mlruns`
            beside the run's directory.
        name: of the run at MLflow; that of the run's directory if None.
        tags: of the run at MLflow.
        required: whether training ends when the logger fails.
    """

    experiment: str = "Default"
    tracking_uri: str | Path | None = None
    name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    required: bool = field(default=False, kw_only=True)
    plugin_name = "mlflow"
    kinds = ("scalars", "media", "text", "config")
    # Fewer than the 10,000 records that a history holds unless they are wide; from it a resumed run
    # sends what was waiting.
    queue_size = 8000
    _backend = fg.PerFit[Backend | None](lambda: None)
    # None in an evaluation by `fulgurite evaluate`.
    _fit = fg.PerFit[fg.Run | None](lambda: None)

    def __post_init__(self) -> None:
        if not isinstance(self.experiment, str) or not self.experiment:
            raise ConfigurationError(
                f"MLflowLogger: experiment is {self.experiment!r}; give its name: "
                "MLflowLogger('digits')"
            )
        if not isinstance(self.tags, dict):
            raise ConfigurationError(
                f"MLflowLogger: tags is {self.tags!r}; give strings by name: "
                'MLflowLogger(tags={"data": "v2"})'
            )

    @property
    def run_id(self) -> str | None:
        """The id of the run at MLflow; None before it has begun, shortly after training has."""
        return None if self._backend is None else self._backend.get_position()["run_id"]

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        """Return what sends records to the run of MLflow that the position names, or to a new
        one."""
        assert run.run_dir is not None
        folder = run.run_dir.path
        note = RunNote(_get_run_id(position))
        is_new_fit_of_state = run.step == run.step_range.start > 0
        # A checkpoint does not name the run if it was saved before MLflow had answered.
        goes_on = position is not None or is_new_fit_of_state
        replaced = None
        if note.run_id is None and goes_on:
            note = read_note(folder)
        if not goes_on:
            replaced = forget_run(folder)
        self._fit = run if isinstance(run, fg.Run) else None
        history = self._fit.history.records if goes_on and self._fit is not None else []
        tags = redact_value({key: str(value) for key, value in self.tags.items()})
        tags = {clean_name(key): value for key, value in tags.items()}
        name, parent_folder = folder.name, None
        store = folder.parent / FOLDER
        if isinstance(run.run_dir, EvaluationDirectory):
            parent_folder = run.run_dir.run.path
            name = f"evaluation of {parent_folder.name}"
            store = parent_folder.parent / FOLDER
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or store
        self._backend = Backend(
            RunIdentity(
                redact_text(self.experiment),
                escape_surrogates(redact_text(self.name or name)),
                tags,
                folder,
                parent_folder,
            ),
            build_uri(uri),
            note,
            run.step,
            history,
            replaced,
        )
        return self._backend

    def check_position(self, folder: Path, position: Any, step: int | None) -> None:
        _get_run_id(position)

    def put(self, record: fg.Record) -> None:
        """Queue a record; if the queue is full, give the server up: training does not wait."""
        if self._writer is not None and self._writer.is_full:
            waiting = (
                f"{self.queue_size} records wait for the server, which is slower than training"
            )
            self._writer.fail(TimeoutError(waiting))
        super().put(record)

    @fg.hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        """Return the id of the run of MLflow at once: a checkpoint does not wait for a server.
        Exact metrics that have not arrived by then are in its history, from which a resumed run
        sends them; other records that wait are lost if the process is killed.

        An evaluation by `fulgurite evaluate` has no history, and waits.
        """
        arrived = super().flush_logger(step)
        if self._fit is None or self._backend is None or arrived.done():
            return arrived
        position: Future[Any] = Future()
        position.set_result(self._backend.get_position())
        return position

    @fg.hookimpl(specname="on_exception")
    def mark_failed(self, run: fg.Run, exception: BaseException) -> None:
        """Note that the run of MLflow ends as failed, or as killed by whoever interrupted it."""
        if self._backend is not None:
            is_failure = isinstance(exception, Exception)
            self._backend.final_status = "FAILED" if is_failure else "KILLED"

    @fg.hookimpl
    def close_logger(self) -> None:
        """End the run of MLflow, as killed if a signal has stopped training."""
        is_interrupted = self._fit is not None and self._fit.stop_reason in ("SIGINT", "SIGTERM")
        if self._backend is not None and is_interrupted:
            self._backend.final_status = "KILLED"
        super().close_logger()


def _get_run_id(position: Any) -> str | None:
    """Return the id of the run in a position from a checkpoint, which becomes part of paths and
    addresses."""
    if position is None:
        return None
    run_id = position.get("run_id") if isinstance(position, dict) else position
    if run_id is not None and not (isinstance(run_id, str) and run_id.isalnum()):
        raise CheckpointError(
            "the checkpoint's position of the MLflow log is not one that this plugin writes: "
            f"{str(position)[:200]}"
        )
    return run_id
