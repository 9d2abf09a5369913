"""The plugin: when checkpoints are written, which stay, and what is read."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import fulgurite as fg
import jax
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    StateError,
    check_one_of,
    set_ints,
)
from fulgurite.metrics import Mode, resolve_mode
from fulgurite.plugins import (
    EngineView,
    as_printable,
    as_trigger,
    check_metric_exists,
    hide_constructor_frames,
)
from fulgurite_runs import RunDirectory, RunPlugin, get_run_directory, open_run, rewind_loggers

from fulgurite_checkpoint import format, restoring
from fulgurite_checkpoint.comparison import Better, Comparison, make_comparison
from fulgurite_checkpoint.coverage import MonitorCoverage
from fulgurite_checkpoint.differences import (
    describe_differences,
    describe_hyperparameter_changes,
    report_hyperparameters,
)
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.format import Entry, Monitor, Verify
from fulgurite_checkpoint.ownership import (
    check_owner,
    check_unused,
    is_resumed_from,
    lock_directory,
)
from fulgurite_checkpoint.references import advise_on_path, as_checkpoint_ref
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.retention import (
    Leftovers,
    RetentionPolicy,
    list_later,
    supersede_later,
)
from fulgurite_checkpoint.saving import Saver, check_place, try_saving
from fulgurite_checkpoint.starting import (
    check_data,
    list_metrics,
    prepare_folder,
    report_changed_loggers,
)
from fulgurite_checkpoint.validation import list_unexpected_actions

MissingPluginPolicy = Literal["error", "warn", "ignore"]
DEFAULT_EVERY = fg.EverySeconds(600)


@dataclass
class _FitState:
    """What the plugin holds during a fit.

    Attributes:
        saver: writes the checkpoints.
        resumed_from: the checkpoint that the fit resumes from, or None.
        is_same_run: whether that one is of this run.
        began_from: the path of the checkpoint that a new run took arrays of, or None.
        directory: that of the checkpoints, where it is not the run's and has a lock of its own.
        coverage: at which steps the monitor was measured, and which were saved.
    """

    saver: Saver | None = None
    directory: RunDirectory | None = None
    resumed_from: SavedCheckpoint | None = None
    is_same_run: bool = False
    began_from: Path | None = None
    coverage: MonitorCoverage = field(default_factory=MonitorCoverage)

    @property
    def resumed_here(self) -> SavedCheckpoint | None:
        """The checkpoint of this run that the fit resumes from, or None."""
        return self.resumed_from if self.is_same_run else None


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class Checkpointer(RunPlugin):
    """Saves everything that a run needs to resume exactly, and restores it.

    Example:
        from fulgurite_checkpoint import Checkpointer

        checkpointer = Checkpointer(every=1000, monitor="train/loss", mode="min")
        engine = fg.Engine(epochs=2, run_dir="runs/digits", plugins=[checkpointer])
        result = engine.fit(model, data, resume="auto")

    Args:
        every: when to save: an interval in steps, or a trigger; by default every ten minutes. The
            end of a run, and a stop, are always saved.
        directory: where to save: a local path or `gs://...`, where no other run saves; the run's
            directory if None.
        max_to_keep: how many of the newest to keep; None for all.
        keep_period: checkpoints whose step is a multiple of this are never removed.
        monitor: a metric `SOURCE/NAME`, such as `test/accuracy`; the best checkpoint by it is kept,
            and `step="best"` refers to it. Only metrics measured at exactly the saved step count,
            and a value that is not finite never wins.
        mode: whether the largest (`max`) or the smallest (`min`) is the best. None to tell it from
            the metric's name: a loss is to be small, an accuracy large; a name that does not tell
            is an error.
        better: `better(metrics, best)` says whether the metrics of a checkpoint are better than
            those of the best so far, instead of `mode`. Both are dictionaries by source, such as
            `metrics["test"]["loss"]`. The name of the function and what it chose are recorded.
        on_exception: whether to save when training ends with an exception, if resuming from there
            is exact. Not with several processes, because the others may not know of it.
        async_save: whether to write while training continues.
        weights_only: whether to leave out the state of the optimizer and what else only training
            needs. Evaluations, predictions and `init_from` read such checkpoints; a run cannot
            resume from them. A selection by `fg.select` or `fg.exclude` is what to save of the
            module; `fg.CheckpointRef(path, strict=False)` fills it in.
        verify: what to check before a checkpoint is read: `full` (every byte), `size`, or `none`.
        on_missing_plugin: what to do if a plugin that affects the numbers was active when a
            checkpoint was saved and is not now, or the other way round: `error`, `warn` or
            `ignore`.
    """

    plugin_name = "checkpoints"

    every: int | fg.Trigger = DEFAULT_EVERY
    directory: str | os.PathLike[str] | None = None
    max_to_keep: int | None = 3
    keep_period: int | None = None
    monitor: str | None = None
    mode: Mode | None = None
    better: Better | None = None
    on_exception: bool = True
    async_save: bool = True
    weights_only: bool | fg.Selector = False
    verify: Verify = "full"
    on_missing_plugin: MissingPluginPolicy = "error"
    _fit = fg.PerFit(_FitState)

    def __post_init__(self) -> None:
        as_trigger(self.every)
        set_ints(self, "max_to_keep", "keep_period")
        for name in ("max_to_keep", "keep_period"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Checkpointer: {name} is {value!r}; it must be a positive integer or None"
                )
        if self.directory is not None:
            resolve_root(self.directory)
        if self.monitor is not None and not _is_metric_name(self.monitor):
            raise ConfigurationError(
                f"Checkpointer: monitor is {self.monitor!r}; it must be SOURCE/NAME, such as "
                f"'test/accuracy'"
            )
        if self.monitor is not None and self.every is DEFAULT_EVERY:
            raise ConfigurationError(
                f"Checkpointer: monitor is {self.monitor!r}, and without every= it saves every ten "
                "minutes, where nothing measures it: give the interval of the evaluation, such as "
                "every=100"
            )
        # Fails here, where the arguments are, if they do not go together.
        comparison = self._comparison
        if comparison is None and (self.monitor is not None or self.mode is not None):
            mode = resolve_mode(self.monitor or "", self.mode, "Checkpointer")
            object.__setattr__(self, "mode", mode)
        if not isinstance(self.weights_only, bool | fg.Selector):
            raise ConfigurationError(
                f"Checkpointer: weights_only is {self.weights_only!r}; it must be True, False or a "
                "selection, such as fg.select('encoder')"
            )
        check_one_of(self.verify, get_args(Verify), "Checkpointer: verify")
        check_one_of(
            self.on_missing_plugin,
            get_args(MissingPluginPolicy),
            "Checkpointer: on_missing_plugin",
        )

    @fg.hookimpl
    def fit_context(self, run: fg.Run) -> AbstractContextManager[None]:
        """Open the run directory, unless another plugin has done it, and lock a directory of the
        checkpoints' own."""
        return self._open(run)

    @contextmanager
    def _open(self, run: fg.Run) -> Iterator[None]:
        with open_run(run), lock_directory(run, self._get_root(run.engine)) as directory:
            self._fit.directory = directory
            yield

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Save, after everything else of a step."""
        return [fg.ScheduledAction("save", self.every, self._save_or_try, "save")]

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Note at which step metrics were measured."""
        if record.kind != "scalars":
            return
        self._fit.coverage.note_metrics(record)
        if self._fit.saver is not None:
            self._fit.saver.note_metrics(record)

    @fg.hookimpl
    def restore_checkpoint(
        self,
        resume: fg.CheckpointRef | str | os.PathLike[str] | int,
        template: fg.TrainState,
        engine: EngineView,
        announce: Callable[[fg.Snapshot], None],
    ) -> fg.Snapshot | None:
        """Read a checkpoint, whole or what the map of a reference names. Write nothing.

        Args:
            resume: which one: a value of `fit(resume=...)`.
            template: a state of shapes, like the one that is needed.
            engine: the engine that trains or evaluates.
            announce: called before the arrays of a whole checkpoint are read.
        """
        reference = as_checkpoint_ref(resume)
        directory = get_run_directory(engine)
        is_same_run = reference.path is None or (
            directory is not None and directory.is_at(reference.path)
        )
        num_attempts = None if directory is None else directory.num_attempts
        root = self._get_root(engine) if is_same_run else resolve_root(reference.path or "")
        # Its owner deletes checkpoints while they are read. Of several processes, the first one may
        # hold the lock already.
        if is_same_run and reference.map is None and jax.process_index() == 0:
            check_unused(root, directory)
        if root is None:
            if reference.optional:
                return None
            raise ConfigurationError("resume names no run: give a path, or Engine(run_dir=...)")
        if not root.is_dir() and not reference.optional:
            raise CheckpointError(f"there is no run in {root}: {advise_on_path(root)}")
        result = self._find_and_read(
            reference, root, template, engine, announce, is_same_run=is_same_run
        )
        if result is None:
            if reference.optional:
                return None
            raise CheckpointError(
                f"there is no checkpoint {reference.step!r} in {root}: {advise_on_path(root)}"
            )
        checkpoint, snapshot = result
        snapshot = replace(snapshot, run_dir=reference.path)
        if reference.step == "best":
            view = checkpoint.find_module_view(self._best_by)
            snapshot = replace(snapshot, module_view=view)
        if reference.map is None:
            self._fit.resumed_from = checkpoint
            self._fit.is_same_run = is_same_run
            has_later = is_same_run and bool(list_later(root, checkpoint.commit.step))
            snapshot = replace(snapshot, is_latest=not has_later, num_attempts=num_attempts)
        else:
            self._fit.began_from = checkpoint.path
        return snapshot

    @property
    def _comparison(self) -> Comparison | None:
        """The comparison by `better`; None without it."""
        return make_comparison(self.better, self.monitor, self.mode)

    @property
    def _best_by(self) -> Monitor | None:
        """The metric by which the best checkpoint is chosen, and its mode, or None for `better`;
        None without one."""
        return None if self.monitor is None else (self.monitor, self.mode)

    def _is_saved_already(self, run: fg.Run) -> bool:
        """Return whether this is a finished run that was started again: its last checkpoint is as
        it would be."""
        checkpoint = self._fit.resumed_here
        if checkpoint is None or not run.is_complete:
            return False
        had_nothing_to_do = not checkpoint.index["pending_actions"]
        # At another end other actions are due, such as those of the end itself.
        had_same_end = fg.StepRange.from_json(checkpoint.index["step_range"]) == run.step_range
        return checkpoint.commit.step == run.step and had_nothing_to_do and had_same_end

    def _save_or_try(self, run: fg.Run) -> None:
        """Save; in a trial, do what of it leaves nothing behind."""
        if run.engine.fast_dev_run is None:
            run.save()
            return
        root = self._get_root(run.engine)
        if root is not None and jax.process_index() == 0:
            check_place(root)
        try_saving(run)

    def _find_and_read(
        self,
        reference: fg.CheckpointRef,
        root: Path,
        template: fg.TrainState,
        engine: EngineView,
        announce: Callable[[fg.Snapshot], None],
        *,
        is_same_run: bool,
    ) -> tuple[SavedCheckpoint, fg.Snapshot] | None:
        """Return the checkpoint of the run at `root` that a reference means, and its snapshot; None
        if there is none at all."""
        rewound_engine = engine if is_same_run and reference.map is None else None
        # Of several processes the first one decides, which has looked at every byte.
        is_alone = jax.process_count() == 1
        decides = is_alone or jax.process_index() == 0 or self.verify == "none"
        verify = self.verify if decides else "size"

        def read(entry: Entry) -> tuple[SavedCheckpoint, fg.Snapshot]:
            if self.directory is not None and reference.path is None and reference.map is None:
                check_owner([entry], get_run_directory(engine))
            with engine.plugins.timings.describe(f"restoring step {entry.step:,}"):
                return read_and_restore(entry)

        def read_and_restore(entry: Entry) -> tuple[SavedCheckpoint, fg.Snapshot]:
            checkpoint = restoring.read_checkpoint(entry, verify)
            if rewound_engine is not None:
                restoring.check_logger_positions(checkpoint, rewound_engine)
            if reference.map is not None:
                snapshot = restoring.restore_part(checkpoint, template, reference, verify)
            else:
                snapshot = restoring.restore_whole(
                    checkpoint, template, engine, announce, verify, self.on_missing_plugin
                )
            return checkpoint, snapshot

        step = reference.step
        if step == "latest" and is_alone:
            return restoring.find_newest(root, read)
        if step == "latest":
            step = engine.sharding.sync.broadcast(
                lambda: restoring.find_newest(
                    root, lambda entry: _check_entry(entry, verify, rewound_engine)
                )
            )
            if step is None:
                return None
        return read(restoring.find_checkpoint(root, step, self._best_by))

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Rewind the loggers of this run to where they were, and warn of what makes the rest of the
        run differ.

        Args:
            run: the run.
            step: that it resumes from.
        """
        checkpoint = self._fit.resumed_from
        if checkpoint is None:
            return
        if run.data_iterator.resume != "restart":
            restoring.check_num_processes(checkpoint, run.data_iterator)
        if self._fit.is_same_run:
            self._supersede_later(run, step)
            rewind_loggers(run.engine.plugins, step, checkpoint.logger_positions)
        differences = describe_differences(checkpoint.manifest, run.manifest)
        differences += describe_hyperparameter_changes(checkpoint.manifest, run.manifest)
        unexpected = list_unexpected_actions(
            checkpoint.index["pending_actions"],
            run.engine.actions,
            fg.StepRange.from_json(checkpoint.index["step_range"]),
            step,
        )
        if unexpected:
            differences.append(f"pending_actions of index.json has {'; '.join(unexpected)}")
        if differences:
            # The model is quoted as the checkpoint has it, which may have been downloaded.
            text = as_printable("; ".join(differences))
            warnings.warn(f"resuming from {checkpoint.path} may not be exact: {text}", stacklevel=2)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Prepare the folder, and refuse data that cannot be resumed."""
        if run.engine.fast_dev_run is not None:
            return
        root = self._get_root(run.engine)
        if root is None:
            raise ConfigurationError(
                "Checkpointer has no place to write to: give Engine(run_dir=...), --run, or "
                "Checkpointer(directory=...). To begin with weights and save nothing: leave the "
                "Checkpointer out, fit(fulgurite_checkpoint.load(path, model=model), data)"
            )
        check_data(run.data_iterator)
        if self.monitor is not None:
            check_metric_exists(run, self.monitor, "Checkpointer")
            self._fit.coverage.monitor = self.monitor
        checkpoint = self._fit.resumed_from
        resumed_here = self._fit.resumed_here
        leftovers = self._prepare_place(run, root)
        self._fit.saver = Saver(
            root,
            RetentionPolicy(self.max_to_keep, self.keep_period, self._best_by),
            self.async_save,
            previous_timings={} if resumed_here is None else resumed_here.commit.timings,
            metrics_by_source=list_metrics(run, checkpoint),
            resumed_from=checkpoint,
            weights_only=self.weights_only,
            comparison=self._comparison,
            directory=self._fit.directory,
        )
        leftovers |= self._fit.saver.remove_superfluous()
        self._fit.saver.report_leftovers(leftovers)
        if checkpoint is not None:
            report_hyperparameters(run)
        if resumed_here is not None:
            report_changed_loggers(run, resumed_here)
        if self._fit.began_from is not None:
            run.notify("checkpoints", f"the run begins with arrays of {self._fit.began_from}")
        # Again, because a process may be killed between a checkpoint and what it says of it.
        self._fit.saver.report_best(run)
        self._report_choice(run)

    def _report_choice(self, run: fg.Run) -> None:
        """Log by what the best checkpoint is chosen."""
        comparison = self._comparison
        if comparison is not None:
            chosen_by = f"the best metrics by {comparison.name}"
        elif self.monitor is not None:
            chosen_by = f"the {'smallest' if self.mode == 'min' else 'largest'} {self.monitor}"
        else:
            return
        run.notify("checkpoints", f"the best checkpoint is that with {chosen_by}")

    def _prepare_place(self, run: fg.Run, root: Path) -> Leftovers:
        """Make the folder, and leave in it what the run continues from; return what could not be
        removed.

        Args:
            run: the run.
            root: of its checkpoints.
        """
        leftovers: Leftovers = {}
        if jax.process_index() == 0:
            leftovers |= prepare_folder(root, run.step)
        if self._fit.resumed_here is None:
            # Without a checkpoint, the fit may continue from the state that it was given.
            has_state = self._fit.resumed_from is None and run.step > 0
            # Until the first save there is nothing else from which a run that was moved, and is
            # killed, could resume.
            continues = has_state or is_resumed_from(root, run)
            target = self._supersede_later(run, run.step if continues else None)
            if target is not None:
                warnings.warn(
                    f"{root} held checkpoints that this run does not resume from: they are now in "
                    f"{target}",
                    stacklevel=2,
                )
        return leftovers

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        """Save; at the end of a run, and where it stops, return when the checkpoint is complete."""
        if self._is_saved_already(run):
            return
        if self._fit.saver is not None:
            self._fit.saver.check_lock(run)
            is_last = run.stop_reason is not None or run.step == run.step_range.stop
            self._fit.coverage.saved_steps.add(run.step)
            if is_last:
                # Before the save, because another record would be a reason for another one.
                self._fit.coverage.report(run)
            self._fit.saver.save(run, wait=is_last)

    @fg.hookimpl
    def on_fit_end(self, result: fg.FitResult) -> None:
        """Let go of everything; warn if there is no best checkpoint after all."""
        saver = self._fit.saver
        self._close()
        if saver is None or self._best_by is None:
            return
        if result.stop_reason is None and jax.process_index() == 0:
            try:
                restoring.find_checkpoint(saver.root, "best", self._best_by)
            except CheckpointError as error:
                warnings.warn(str(error), stacklevel=2)

    @fg.hookimpl(specname="on_exception")
    def _save_on_exception(self, run: fg.Run, exception: BaseException) -> None:
        saver = self._fit.saver if self.on_exception and _can_save_after(exception) else None
        try:
            if saver is not None and not saver.has_given_up:
                saver.check_lock(run)
                saver.save(run, wait=True)
        except StateError as error:
            warnings.warn(
                f"nothing is saved after {type(exception).__name__}: {error}", stacklevel=2
            )
        finally:
            self._close()

    def _get_root(self, engine: EngineView) -> Path | None:
        """Return the directory that holds `checkpoints/`, or None if there is none."""
        if self.directory is None:
            directory = get_run_directory(engine)
            return None if directory is None else directory.path
        root = resolve_root(self.directory)
        # The program may change its working directory.
        return root.absolute() if isinstance(root, Path) else root

    def _supersede_later(self, run: fg.Run, step: int | None) -> Path | None:
        """Move what is later than `step`, or everything, out of the way; return where to.

        fulgurite-runs does that in the run's directory, the only one it knows. Left elsewhere,
        checkpoints of higher steps would be the newest, and those of the new run would be removed.
        """
        root = self._get_root(run.engine)
        if root is None or jax.process_index() != 0 or run.engine.fast_dev_run is not None:
            return None
        if run.run_dir is not None and run.run_dir.is_at(root):
            return None
        # Who names the directory itself continues a run that was moved.
        if not is_resumed_from(root, run):
            is_new = self._fit.resumed_here is None
            entries = format.list_entries(root) if is_new else list_later(root, step)
            check_owner(entries, run.run_dir)
        try:
            return supersede_later(root, step)
        except OSError as error:
            raise CheckpointError(
                f"later checkpoints in {root} cannot be moved to superseded/: {error}. Make it "
                f"writable, or choose another directory"
            ) from error

    def _close(self) -> None:
        saver = self._fit.saver
        self._fit.saver = None
        self._fit.resumed_from = None
        if saver is not None:
            saver.close()


def _can_save_after(exception: BaseException) -> bool:
    # What fails in one of several processes cannot be saved by all of them.
    is_shared = isinstance(exception, Exception) and jax.process_count() == 1
    return is_shared and not isinstance(exception, NonFiniteError)


def _is_metric_name(monitor: object) -> bool:
    return isinstance(monitor, str) and all(monitor.partition("/"))


def _check_entry(entry: Entry, verify: Verify, rewound_engine: EngineView | None) -> int:
    """Return the step of a checkpoint that is not damaged.

    Args:
        entry: the checkpoint.
        verify: how its files are compared with their hashes.
        rewound_engine: whose loggers must be able to go back to it; None if they need not.
    """
    checkpoint = restoring.read_checkpoint(entry, verify)
    if rewound_engine is not None:
        restoring.check_logger_positions(checkpoint, rewound_engine)
    if verify != "none":
        format.verify_files(checkpoint.path, checkpoint.commit, verify)
    return entry.step
