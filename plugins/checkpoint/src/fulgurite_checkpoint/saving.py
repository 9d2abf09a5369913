"""Saving a run: the arrays leave the device at once, everything else happens in the background."""

import os
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite.fit.monitor import find_module_view
from fulgurite.redact import format_error, mask_value
from fulgurite.waits import WaitAbandoned
from fulgurite_runs.hyperparameters import takes_program
from fulgurite_runs.json_codec import dumps
from fulgurite_runs.loggers import flush_loggers

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.format import Commit, Entry
from fulgurite_checkpoint.history import HistoryEncoder
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.retention import RetentionPolicy, clear
from fulgurite_checkpoint.writing import PendingCheckpoint

MAX_FAILURES = 3
"""So many failed saves in a row end the run; the message says so in words."""


class SaveError(CheckpointError):
    """Checkpoints repeatedly could not be written. This ends the fit, but what was trained is in
    `result`.

    Attributes:
        result: what `fit` would have returned at that step.
    """

    def __init__(self, message: str, result: fg.FitResult) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, eq=False)
class _Content:
    """What a checkpoint holds, as far as it tells one from another.

    Of one step there may be two states: before and after what was pending, or an action, at that
    step.
    """

    step: int
    num_records: int
    pending_actions: tuple[str, ...]
    state_step: jax.Array

    def is_same(self, other: "_Content | None") -> bool:
        return (
            other is not None
            and self.state_step is other.state_step
            and self.step == other.step
            and self.num_records == other.num_records
            and self.pending_actions == other.pending_actions
        )


@dataclass
class Saver:
    """Writes the checkpoints of one fit, one at a time.

    A save that fails leaves all older checkpoints as they are. The next one tries again; the third
    failure in a row ends the run.

    Args:
        root: of the run to which they belong.
        policy: which of them stay.
        is_async: whether they are written while training continues.
        previous_timings: seconds by name of earlier attempts of the run.
        metrics_by_source: the newest metrics of each source, with the step at which they were
            measured.
        resumed_from: the checkpoint that the fit resumes from, or None.
        weights_only: whether to leave out what only training needs; a selector is what to save of
            the module.
    """

    root: Path
    policy: RetentionPolicy
    is_async: bool
    previous_timings: dict[str, float]
    metrics_by_source: dict[str, tuple[int, dict[str, Any]]]
    resumed_from: SavedCheckpoint | None = None
    weights_only: bool | fg.Selector = False

    def __post_init__(self) -> None:
        self._saving: tuple[_Content, PendingCheckpoint] | None = None
        self._saved: _Content | None = None
        self._num_failures = 0
        self._has_warned_of_monitor = False
        self._history_encoder = HistoryEncoder()
        self._num_own_records = 0
        self._best: Entry | None = None
        if self.policy.best_by is not None and jax.process_index() == 0:
            self._best = format.find_best(format.list_entries(self.root), *self.policy.best_by)

    def note_metrics(self, record: fg.Record) -> None:
        """Note metrics with the step at which they were measured."""
        step, values = self.metrics_by_source.get(record.source, (None, {}))
        if step == record.step:
            values = values | record.values
        else:
            values = dict(record.values)
        self.metrics_by_source[record.source] = (record.step, values)

    def report_best(self, run: fg.Run) -> None:
        """Tell the loggers which checkpoint is the best, if any is: services show where it is."""
        if self._best is None or self.policy.best_by is None:
            return
        path = self._best.path
        best = {
            "path": str(path.absolute() if isinstance(path, Path) else path),
            "step": self._best.step,
            "metric": self.policy.best_by[0],
            "value": self._best.get_metric(self.policy.best_by[0]),
        }
        run.log_config("checkpoints", {"best": best}, stream="telemetry")
        self._num_own_records += 1

    def save(self, run: fg.Run, *, wait: bool) -> None:
        """Save the run as it is, unless that was the last thing that was saved.

        Args:
            run: the run.
            wait: whether to return only when the checkpoint is complete.
        """
        snapshot = run.snapshot()
        # What it says of a checkpoint is no reason to save another one.
        num_records = run.num_records - self._num_own_records
        content = _Content(run.step, num_records, snapshot.pending_actions, snapshot.state.step)
        while True:
            self.settle(run)
            if not content.is_same(self._saved):
                # The save before may have taken long, and the next one creates a folder.
                check_lock(run)
                self._start(run, snapshot, content)
            if self.is_async and not wait:
                return
            self.settle(run)
            if content.is_same(self._saved) or not wait:
                return

    def _list_arrays(self, state: fg.TrainState) -> dict[str, Any]:
        """Return what to save of a state, by path."""
        if not self.weights_only:
            return arrays.flatten_state(state)
        weights = arrays.drop_training_arrays(arrays.flatten_state(state))
        if isinstance(self.weights_only, fg.Selector):
            return arrays.drop_unselected(weights, state, self.weights_only)
        return weights

    def settle(self, run: fg.Run) -> None:
        """Wait for the save in progress, and report its failure."""
        if self._saving is None:
            return
        content, pending = self._saving
        self._saving = None
        try:
            commit = pending.wait_for_commit()
        except Exception as error:
            self._report_failure(run, content.step, error)
        else:
            self._saved = content
            self._num_failures = 0
            self._note_best(run, commit)

    def close(self) -> None:
        """Wait for the save in progress; warn if it failed."""
        if self._saving is None:
            return
        content, pending = self._saving
        self._saving = None
        try:
            pending.wait_for_commit()
        except Exception as error:
            warnings.warn(_format_failure(content.step, error), stacklevel=2)
        except WaitAbandoned as wait:
            # The run ends already, and for another reason.
            warnings.warn(str(wait), stacklevel=2)

    def _start(self, run: fg.Run, snapshot: fg.Snapshot, content: _Content) -> None:
        step = run.step
        process = jax.process_index()
        run.engine.plugins.call("on_save", step, run=run, step=step)
        metrics = {
            source: values
            for source, (measured_at, values) in self.metrics_by_source.items()
            if measured_at == step
        }
        self._check_monitor(metrics)
        arrays_by_path = self._list_arrays(snapshot.state)
        host = {"host_states": snapshot.host_states, "data_position": snapshot.data_position}
        texts = {f"host-{process}.json": _encode_host(host)}
        if process == 0:
            texts["manifest.json"] = dumps(self._make_manifest(run))
            index = _make_index(snapshot, arrays_by_path)
            index["weights_only"] = bool(self.weights_only)
            index["module_views"] = _find_module_views(run, metrics)
            index["data_restarted"] = self._has_data_restarted(run)
            texts["index.json"] = dumps(index)
            texts["history.json"] = self._history_encoder.encode(snapshot.history)
        policy = self.policy
        commit = Commit(
            step=step,
            attempt=run.attempt,
            hashes=[],
            logger_positions=[],
            metrics=mask_value(metrics),
            monitor=policy.best_by,
            timings=mask_value(self._sum_timings(run)),
            wall_time=time.time(),
        )
        # Renamed when complete: so a `step-N` without COMMIT is damage, and the same step can be
        # saved again while the old checkpoint stays until its successor is there.
        path = format.get_checkpoint_folder(self.root) / f"saving-step-{step}"
        get_positions: dict[str, Callable[[], Any]] = {}
        try:
            if process == 0:
                clear(path)
                path.mkdir(parents=True)
                get_positions = flush_loggers(run.engine.plugins, run.step)
            arrays_written = arrays.start_saving(path / "arrays", arrays_by_path)
        except Exception as error:
            # A failure counts when the save is settled, on every process.
            arrays_written = Future()
            arrays_written.set_exception(error)
        pending = PendingCheckpoint(
            path,
            texts,
            arrays_written,
            get_positions,
            commit,
            policy,
            _do_nothing if run.run_dir is None else run.run_dir.assert_locked,
            run.engine.sharding.sync,
        )
        pending.start()
        self._saving = content, pending

    def _make_manifest(self, run: fg.Run) -> dict[str, Any]:
        """Return what made the state: where no step was taken since the resume, that of the
        checkpoint."""
        checkpoint = self.resumed_from
        if checkpoint is None or checkpoint.commit.step != run.step:
            return run.manifest
        current = run.manifest
        manifest = {**current, **checkpoint.manifest, "plugins": current["plugins"]}
        if takes_program(run.resume):
            manifest["hyperparameters"] = current["hyperparameters"]
        length = {name: current["settings"][name] for name in ("steps", "epochs")}
        return {**manifest, "settings": {**manifest["settings"], **length}}

    def _has_data_restarted(self, run: fg.Run) -> bool:
        """Return whether the data has begun anew at a resume, so that its position counts from
        there."""
        if self.resumed_from is None:
            return False
        return run.data_iterator.resume == "restart" or self.resumed_from.has_data_restarted

    def _sum_timings(self, run: fg.Run) -> dict[str, float]:
        timings = dict(self.previous_timings)
        for name, seconds in run.timings.seconds.items():
            timings[name] = timings.get(name, 0.0) + seconds
        return timings

    def _check_monitor(self, metrics: dict[str, dict[str, Any]]) -> None:
        """Warn once if the metric of the best is not among those that its source has just
        measured."""
        if self.policy.best_by is None:
            return
        monitor, _ = self.policy.best_by
        source, _, name = monitor.partition("/")
        values = metrics.get(source, {})
        if not values or source == "train" or name in values or self._has_warned_of_monitor:
            return
        self._has_warned_of_monitor = True
        warnings.warn(
            f"the best checkpoint is that by {monitor!r}, which {source!r} does not "
            f"measure. {did_you_mean(name, values)}",
            stacklevel=2,
        )

    def _note_best(self, run: fg.Run, commit: Commit) -> None:
        """Tell of a complete checkpoint if it is the best so far."""
        if self.policy.best_by is None or jax.process_index() != 0:
            return
        path = format.get_checkpoint_folder(self.root) / f"step-{commit.step}"
        newest = Entry(commit.step, path, commit)
        known = [] if self._best is None else [self._best]
        if format.find_best([*known, newest], *self.policy.best_by) is newest:
            self._best = newest
            self.report_best(run)

    def _report_failure(self, run: fg.Run, step: int, error: Exception) -> None:
        self._num_failures += 1
        reason = _format_failure(step, error)
        if self._num_failures == MAX_FAILURES:
            raise SaveError(
                f"{reason}. That was the third failure in a row; the older checkpoints in "
                f"{self.root} are as they were. Make room or choose another directory, and start "
                f"the run again. What was trained so far is in this error's `result`",
                _make_result(run, reason),
            ) from error
        warnings.warn(
            f"{reason}. Older checkpoints are unchanged; the next save tries again", stacklevel=2
        )
        run.log_text("checkpoints", {"message": reason, "failed": "save"}, stream="telemetry")


def check_lock(run: fg.Run) -> None:
    """Raise `CheckpointError`, on all processes, if this run may not write to its directory any
    more."""
    if run.run_dir is not None:
        run.engine.sharding.sync.broadcast(run.run_dir.assert_locked)


def try_saving(run: fg.Run) -> None:
    """Do everything of a save that writes nothing: collect the state of all plugins, and turn into
    text what a checkpoint holds as text.

    Raises:
        ConfigurationError: a host state or the data's state cannot be written as JSON.
    """
    snapshot = run.snapshot()
    _encode_host({"host_states": snapshot.host_states, "data_position": snapshot.data_position})
    dumps(_make_index(snapshot, arrays.flatten_state(snapshot.state)))
    HistoryEncoder().encode(snapshot.history)


def check_place(root: Path) -> None:
    """Raise an error if checkpoints could not be written to the run at `root`, without creating
    it.

    Raises:
        CheckpointError: the name is one that cannot be used, or there is no permission.
    """
    folder = format.get_checkpoint_folder(root)
    arrays.check_writable(folder)
    if not isinstance(folder, Path):
        return
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"checkpoints cannot be written to {root}: no permission to write to {parent}. Make it "
            f"writable, or choose another place"
        )


def _make_index(snapshot: fg.Snapshot, arrays_by_path: dict[str, Any]) -> dict[str, Any]:
    return {
        "arrays": {name: arrays.get_spec(array) for name, array in arrays_by_path.items()},
        "step_range": snapshot.step_range.to_json(),
        "pending_actions": snapshot.pending_actions,
        "metrics": mask_value(snapshot.metrics),
        "stop_reason": snapshot.stop_reason,
    }


def _find_module_views(run: fg.Run, sources: Iterable[str]) -> dict[str, str]:
    """Return the module view whose weights each source has measured, where it is not the module."""
    views = {source: find_module_view(run.engine, source) for source in sources}
    return {source: view for source, view in views.items() if view != "current"}


def _encode_host(host: dict[str, Any]) -> str:
    """Return the JSON of what belongs to the host; an error for a host state names its plugin."""
    try:
        return dumps(host)
    except ConfigurationError:
        for name, state in host["host_states"].items():
            try:
                dumps(state)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"plugin {name!r}, hook get_host_state: {error}"
                ) from error
        raise


def _format_failure(step: int, error: BaseException) -> str:
    return f"the checkpoint of step {step} could not be written: {format_error(error)}"


def _make_result(run: fg.Run, reason: str) -> fg.FitResult:
    """Return what was trained, for a fit that ends without a checkpoint of it."""
    state = run.state
    return fg.FitResult(
        module=state.module,
        model_state=state.model_state,
        state=state,
        history=run.history,
        metrics=run.metrics,
        timings=run.timings,
        stop_reason=run.stop_reason or "the checkpoints cannot be written",
        failures={"checkpoints": reason},
        messages=[reason],
        shared=run.shared,
    )


def _do_nothing() -> None:
    pass
