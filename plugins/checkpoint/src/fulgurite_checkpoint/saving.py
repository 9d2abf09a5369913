"""Saving a run: the arrays leave the device at once, everything else happens in the background."""

import os
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, SaveError, did_you_mean
from fulgurite.plugins import WaitAbandoned, find_module_view, format_error, redact_registered_value
from fulgurite_runs import (
    RunDirectory,
    call_abandonable,
    encode_readable,
    flush_loggers,
    takes_program,
)

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.comparison import Comparison
from fulgurite_checkpoint.contents import check_contents, encode_host, make_index
from fulgurite_checkpoint.format import Commit, Entry
from fulgurite_checkpoint.history import HistoryEncoder
from fulgurite_checkpoint.ownership import get_run_path
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.retention import Leftovers, RetentionPolicy, clear
from fulgurite_checkpoint.writing import PendingCheckpoint

MAX_FAILURES = 3
"""So many failed saves in a row end the run; the message says so in words."""


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
        comparison: by which the best is chosen, instead of a mode; None for that of the policy.
        directory: that of the checkpoints, where it is not the run's and has a lock of its own.
    """

    root: Path
    policy: RetentionPolicy
    is_async: bool
    previous_timings: dict[str, float]
    metrics_by_source: dict[str, tuple[int, dict[str, Any]]]
    resumed_from: SavedCheckpoint | None = None
    weights_only: bool | fg.Selector = False
    comparison: Comparison | None = None
    directory: RunDirectory | None = None

    def __post_init__(self) -> None:
        self._saving: tuple[_Content, PendingCheckpoint] | None = None
        self._saved: _Content | None = None
        self._num_failures = 0
        self._has_warned_of_monitor = False
        self._history_encoder = HistoryEncoder()
        self._num_own_records = 0
        self._told_leftovers: set[Path] = set()
        self._telemetry: set[str] = set()
        if self.resumed_from is not None:
            self._telemetry |= set(self.resumed_from.commit.telemetry)
        self._best: Entry | None = None
        if self.policy.best_by is not None and jax.process_index() == 0:
            entries = format.list_entries(self.root)
            if self.comparison is None:
                self._best = format.find_best(entries, *self.policy.best_by)
            else:
                self._best = self.comparison.find_best(entries)

    @property
    def has_given_up(self) -> bool:
        """Whether saves have failed so often that the run ends."""
        return self._num_failures >= MAX_FAILURES

    def remove_superfluous(self) -> Leftovers:
        """Remove what a process that was killed between its last checkpoint and this has left too
        many; return what could not be removed."""
        if jax.process_index() != 0:
            return {}
        return self.policy.apply(self.root, self._best)

    def note_metrics(self, record: fg.Record) -> None:
        """Note metrics with the step at which they were measured."""
        step, values = self.metrics_by_source.get(record.source, (None, {}))
        if step == record.step:
            values = values | record.values
        else:
            values = dict(record.values)
        self.metrics_by_source[record.source] = (record.step, values)
        if record.stream == "telemetry":
            self._telemetry |= {f"{record.source}/{name}" for name in record.values}

    def report_leftovers(self, leftovers: Leftovers) -> None:
        """Warn, once for each, of older checkpoints that could not be removed."""
        for path, reason in leftovers.items():
            if path not in self._told_leftovers:
                self._told_leftovers.add(path)
                warnings.warn(
                    f"{path} need not stay, and could not be removed: {reason}. The others are; "
                    "remove it yourself",
                    stacklevel=2,
                )

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
        # What it says of a checkpoint is not a reason to save another one.
        num_records = run.num_records - self._num_own_records
        content = _Content(run.step, num_records, snapshot.pending_actions, snapshot.state.step)
        while True:
            self.settle(run)
            if not content.is_same(self._saved):
                # The save before may have taken long, and the next one creates a folder.
                self.check_lock(run)
                self._start(run, snapshot, content)
            if self.is_async and not wait:
                return
            self.settle(run)
            if content.is_same(self._saved) or not wait:
                return

    def check_lock(self, run: fg.Run) -> None:
        """Raise `CheckpointError`, on all processes, if this run may not write to its directories
        any more."""
        run.engine.sharding.sync.broadcast(partial(self._assert_locked, run))

    def _assert_locked(self, run: fg.Run) -> None:
        for directory in (run.run_dir, self.directory):
            if directory is not None:
                directory.assert_locked()

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
        label = f"saving step {content.step:,}"
        try:
            with run.timings.describe(label, pending.num_bytes, "bytes") as activity:
                commit = pending.wait_for_commit(activity)
        except Exception as error:
            self._report_failure(run, content.step, error)
        else:
            self._saved = content
            self._num_failures = 0
            self.report_leftovers(pending.leftovers)
            self._note_best(run, commit)

    def close(self) -> None:
        """Wait for the save in progress; warn if it failed."""
        if self._saving is None:
            return
        content, pending = self._saving
        self._saving = None
        try:
            pending.wait_for_commit()
            self.report_leftovers(pending.leftovers)
        except Exception as error:
            warnings.warn(_format_failure(content.step, error), stacklevel=2)
        except WaitAbandoned as wait:
            # The run ends already, and for another reason.
            warnings.warn(str(wait), stacklevel=2)

    def _start(self, run: fg.Run, snapshot: fg.Snapshot, content: _Content) -> None:
        step = run.step
        process = jax.process_index()
        run.engine.plugins.hooks.on_save.call(step, run=run, step=step)
        metrics = {
            source: values
            for source, (measured_at, values) in self.metrics_by_source.items()
            if measured_at == step
        }
        self._check_monitor(metrics)
        arrays_by_path = self._list_arrays(snapshot.state)
        texts, failure = self._try_encoding(run, snapshot, metrics, arrays_by_path)
        policy = self.policy
        commit = Commit(
            step=step,
            attempt=run.attempt,
            hashes=[],
            logger_positions=[],
            metrics=redact_registered_value(metrics),
            monitor=policy.best_by,
            timings=redact_registered_value(self._sum_timings(run)),
            wall_time=time.time(),
            run=get_run_path(run.run_dir),
            telemetry=redact_registered_value(
                sorted(self._telemetry & {f"{s}/{name}" for s in metrics for name in metrics[s]})
            ),
        )
        commit = self._record_best(commit)
        # Renamed when complete: so a `step-N` without COMMIT is damage, and the same step can be
        # saved again while the old checkpoint stays until its successor is there.
        path = format.get_checkpoint_folder(self.root) / f"saving-step-{step}"
        get_positions: dict[str, Callable[[], Any]] = {}
        try:
            if failure is not None:
                raise failure
            if process == 0:
                call_abandonable(f"the folder {path}", partial(_make_folder, path))
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
            partial(self._assert_locked, run),
            run.engine.sharding.sync,
            sum(array.nbytes for array in arrays_by_path.values()),
        )
        pending.start()
        self._saving = content, pending

    def _try_encoding(
        self,
        run: fg.Run,
        snapshot: fg.Snapshot,
        metrics: dict[str, dict[str, Any]],
        arrays_by_path: dict[str, Any],
    ) -> tuple[dict[str, str], Exception | None]:
        """Return the small files of a checkpoint by name, and what went wrong.

        Before anything is saved, that ends the fit; later, when a state has grown too large, it is
        a save that fails, because what was trained since is worth more.

        Args:
            run: the run.
            snapshot: of it.
            metrics: those measured at this step, by source.
            arrays_by_path: what is saved of the state.
        """
        process = jax.process_index()
        is_first = self._saved is None and self._num_failures == 0
        try:
            texts = {f"host-{process}.json": encode_host(snapshot)}
            if process != 0:
                return texts, None
            index = make_index(snapshot, arrays_by_path)
            index["weights_only"] = bool(self.weights_only)
            index["module_views"] = _find_module_views(run, metrics)
            index["data_restarted"] = self._has_data_restarted(run)
            texts["index.json"] = encode_readable(index, "index.json")
            texts["manifest.json"] = encode_readable(self._make_manifest(run), "manifest.json")
            if is_first:
                check_contents(self.root, run.step, texts)
            texts["history.json"] = self._history_encoder.encode(snapshot.history)
        except ConfigurationError as error:
            if is_first:
                raise
            return {}, error
        return texts, None

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
        """Return whether the data has started over at a resume, so that its position counts from
        there."""
        if self.resumed_from is None:
            return False
        return (
            run.data_iterator.resume == "restart" or self.resumed_from.contents.has_data_restarted
        )

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

    def _record_best(self, commit: Commit) -> Commit:
        """Return a commit that says which checkpoint is the best so far, if a comparison does."""
        if self.comparison is None or jax.process_index() != 0:
            return commit
        best = self._best
        newest = self._make_entry(commit)
        if self.comparison.is_better(newest, best):
            best = newest
        best_step = None if best is None else best.step
        return replace(commit, better=self.comparison.name, best=best_step)

    def _make_entry(self, commit: Commit) -> Entry:
        path = format.get_checkpoint_folder(self.root) / f"step-{commit.step}"
        return Entry(commit.step, path, commit)

    def _note_best(self, run: fg.Run, commit: Commit) -> None:
        """Tell of a complete checkpoint if it is the best so far."""
        if self.policy.best_by is None or jax.process_index() != 0:
            return
        newest = self._make_entry(commit)
        if self.comparison is None:
            known = [] if self._best is None else [self._best]
            is_best = format.find_best([*known, newest], *self.policy.best_by) is newest
        else:
            is_best = commit.best == commit.step
        if is_best:
            self._best = newest
            self.report_best(run)

    def _report_failure(self, run: fg.Run, step: int, error: Exception) -> None:
        self._num_failures += 1
        reason = _format_failure(step, error)
        if self.has_given_up:
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


def _make_folder(path: Path) -> None:
    """Make an empty folder, in place of one that an earlier save has left."""
    clear(path)
    path.mkdir(parents=True)


def try_saving(run: fg.Run) -> None:
    """Do everything of a save that writes nothing: collect the state of all plugins, and turn into
    text what a checkpoint holds as text.

    Raises:
        ConfigurationError: a host state or the data's state cannot be written as JSON, or no run
            could resume from it.
    """
    snapshot = run.snapshot()
    # A trial of a run that resumes ends elsewhere than the run.
    step_range = replace(snapshot.step_range, stop=run.step)
    snapshot = replace(snapshot, step_range=step_range, stop_reason="the trial ends")
    index = make_index(snapshot, arrays.flatten_state(snapshot.state))
    texts = {
        "host-0.json": encode_host(snapshot),
        "index.json": encode_readable(index, "index.json"),
        "manifest.json": encode_readable(run.manifest, "manifest.json"),
    }
    check_contents(Path("checkpoints"), run.step, texts)
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


def _find_module_views(run: fg.Run, sources: Iterable[str]) -> dict[str, str]:
    """Return the module view whose weights each source has measured, where it is not the module."""
    views = {source: find_module_view(run.engine, source) for source in sources}
    return {source: view for source, view in views.items() if view != "current"}


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
