"""The plugin: when checkpoints are written, which stay, and what is read."""

import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, NonFiniteError, StateError
from fulgurite.fit.run import EngineView
from fulgurite.triggers import as_trigger
from fulgurite_runs import RunPlugin, get_run_directory

from fulgurite_checkpoint import arrays, format, restoring
from fulgurite_checkpoint.format import Entry, Verify, resolve_root
from fulgurite_checkpoint.references import as_checkpoint_ref
from fulgurite_checkpoint.restoring import Read
from fulgurite_checkpoint.retention import RetentionPolicy, list_later, recover, supersede
from fulgurite_checkpoint.saving import Saver


@dataclass
class _Fit:
    """What the plugin remembers of the fit that is going on."""

    saver: Saver | None = None
    read: Read | None = None
    own: bool = False


@dataclass(frozen=True, eq=False)
class Checkpointer(RunPlugin):
    """Saves everything that a run needs to resume exactly, and restores it.

    Args:
        every: when to save: an interval in steps, or a trigger. The end of a run, and a stop, are
            always saved.
        directory: where to save: a local path or `gs://...`; the run's directory if None.
        max_to_keep: how many of the newest to keep; None for all.
        keep_period: checkpoints whose step is a multiple of this are never removed.
        monitor: a metric `SOURCE/NAME`, such as `test/accuracy`; the best checkpoint by it is kept,
            and `step="best"` refers to it. Only metrics measured at exactly the saved step count,
            and NaN never wins.
        mode: whether the largest (`max`) or the smallest (`min`) is the best.
        on_exception: whether to save when training ends with an exception, if resuming from there
            is exact. Not with several processes, because the others may not know of it.
        async_save: whether to write while training continues.
        verify: what to check before a checkpoint is read: `full` (every byte), `size`, or `none`.
        on_missing_plugin: what to do if a plugin that affects the numbers was active when a
            checkpoint was saved and is
            not now, or the other way round: `error`, `warn` or `ignore`.
        resume_data: how to resume data that has no state: `exact` refuses it, `replay` reads and
            skips the batches already seen, `restart` starts again with the first batch, which is
            not exact.
    """

    plugin_name = "checkpoints"

    every: int | fg.Trigger
    directory: str | os.PathLike[str] | None = None
    max_to_keep: int | None = 3
    keep_period: int | None = None
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    on_exception: bool = True
    async_save: bool = True
    verify: Verify = "full"
    on_missing_plugin: Literal["error", "warn", "ignore"] = "error"
    resume_data: Literal["exact", "replay", "restart"] = "exact"
    _fit: _Fit = field(default_factory=_Fit, init=False, repr=False)

    def __post_init__(self) -> None:
        as_trigger(self.every)
        for name in ("max_to_keep", "keep_period"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Checkpointer: {name} is {value!r}; it must be a positive integer or None"
                )
        if self.directory is not None:
            resolve_root(self.directory)
        if self.monitor is not None and not (
            isinstance(self.monitor, str) and all(self.monitor.partition("/"))
        ):
            raise ConfigurationError(
                f"Checkpointer: monitor is {self.monitor!r}; it must be SOURCE/NAME, such as "
                f"'test/accuracy'"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"Checkpointer: {name} is {getattr(self, name)!r}; choose "
                    f"{', '.join(map(repr, choices))}"
                )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Saves, after everything else of a step."""
        return [fg.ScheduledAction("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        """Notes at which step metrics were measured."""
        if self._fit.saver is not None:
            self._fit.saver.note_metrics(record)

    @fg.hookimpl
    def restore_checkpoint(
        self,
        resume: fg.CheckpointRef | str | os.PathLike[str] | int,
        template: fg.TrainState,
        engine: EngineView,
    ) -> fg.Snapshot | None:
        """Read a checkpoint, whole or what the map of a reference names. Write nothing.

        Args:
            resume: which one: a value of `fit(resume=...)`.
            template: a state of shapes, like the one that is needed.
            engine: the engine that trains or evaluates.
        """
        reference = as_checkpoint_ref(resume)
        directory = get_run_directory(engine)
        is_same_run = reference.path is None or (
            directory is not None and directory.is_at(reference.path)
        )
        num_attempts = None if directory is None else directory.num_attempts
        root = self._root(engine) if is_same_run else resolve_root(reference.path or "")
        if root is None:
            if reference.optional:
                return None
            raise ConfigurationError("resume names no run: give a path, or Engine(run_dir=...)")
        if not root.is_dir() and not reference.optional:
            raise CheckpointError(f"there is no run in {root}: check the path")
        restored = self._find_and_read(reference, root, template, engine)
        if restored is None:
            if reference.optional:
                return None
            raise CheckpointError(
                f"there is no checkpoint {reference.step!r} in {root}: check the path"
            )
        checkpoint, snapshot = restored
        snapshot = replace(snapshot, run_dir=reference.path)
        if reference.map is None:
            self._fit.read = checkpoint
            self._fit.own = is_same_run
            later = is_same_run and bool(list_later(root, checkpoint.commit.step))
            snapshot = replace(snapshot, is_latest=not later, num_attempts=num_attempts)
        return replace(snapshot, data_position=None) if self.resume_data == "restart" else snapshot

    def _find_and_read(
        self, reference: fg.CheckpointRef, root: Path, template: fg.TrainState, engine: EngineView
    ) -> tuple[Read, fg.Snapshot] | None:
        """Return the checkpoint of the run at `root` that a reference means, and its snapshot; None
        if there is none at all."""
        # Of several processes the first one decides, which has looked at every byte.
        is_alone = jax.process_count() == 1
        decides = is_alone or jax.process_index() == 0 or self.verify == "none"
        verify = self.verify if decides else "size"

        def read(entry: Entry) -> tuple[Read, fg.Snapshot]:
            checkpoint = restoring.read_checkpoint(entry, verify)
            if reference.map is not None:
                snapshot = restoring.restore_part(checkpoint, template, reference, verify)
            else:
                snapshot = restoring.restore_whole(
                    checkpoint, template, engine, verify, self.on_missing_plugin
                )
            return checkpoint, snapshot

        step = reference.step
        if step == "latest" and is_alone:
            return restoring.find_newest(root, read)
        if step == "latest":
            step = engine.sharding.sync.broadcast(
                lambda: restoring.find_newest(root, lambda entry: _check_entry(entry, verify))
            )
            if step is None:
                return None
        best = None if self.monitor is None else (self.monitor, self.mode)
        return read(restoring.find_checkpoint(root, step, best))

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Rewinds the sinks of this run to where they were, and says what makes the rest of the run
        differ."""
        kept = self._fit.read
        if kept is None:
            return
        if self.resume_data != "restart":
            restoring.check_processes(kept, run.data_iterator)
        if self._fit.own:
            self._set_aside(run, step)
        positions = kept.positions if self._fit.own else {}
        for hook in run.engine.plugins.implementations("rewind_logger"):
            if hook.plugin.name in positions:
                hook(step, position=positions[hook.plugin.name])
        if rows := restoring.describe_differences(kept.manifest, run.manifest):
            warnings.warn(
                f"resuming from {kept.path} may not be exact: {'; '.join(rows)}", stacklevel=2
            )

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Prepares the place, and refuses data that cannot go on."""
        if run.engine.fast_dev_run is not None:
            return
        root = self._root(run.engine)
        if root is None:
            raise ConfigurationError(
                "Checkpointer has no place to write to: give Engine(run_dir=...), --run, or "
                "Checkpointer(directory=...)"
            )
        self._check_data(run)
        read, own = self._fit.read, self._fit.own
        if jax.process_index() == 0:
            _prepare(root, run.step)
        # What it goes on from, if it was not restored here, is the state that it was given.
        if not (read and own) and (
            target := self._set_aside(run, None if read else run.step or None)
        ):
            told = (
                f"{root} held checkpoints that this run does not resume from: they are in {target} "
                f"now"
            )
            warnings.warn(told, stacklevel=2)
        timers = read.commit.timers if read and own else {}
        policy = RetentionPolicy(self.max_to_keep, self.keep_period, self.monitor, self.mode)
        # What was measured at this step before, which is saved anew if nothing comes after it.
        measured = read.commit.metrics if read and read.commit.step == run.step else {}
        measured = {source: (run.step, values) for source, values in measured.items()}
        before = (read.commit.step, read.manifest) if read else None
        self._fit.saver = Saver(root, policy, self.async_save, timers, measured, before)
        if read and own:
            _note_sinks(run, read)

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        """Saves; at the end of a run, and where it stops, returns when the checkpoint is
        complete."""
        if run.run_dir is not None:
            run.engine.sharding.sync.broadcast(run.run_dir.assert_locked)
        if self._fit.saver is not None:
            self._fit.saver.save(
                run, wait=run.stop_reason is not None or run.step == run.step_range.stop
            )

    @fg.hookimpl
    def on_fit_end(self, result: fg.FitResult) -> None:
        """Lets go of everything; says so if there is no best checkpoint after all."""
        saver = self._fit.saver
        self._close()
        if (
            saver is not None
            and self.monitor is not None
            and result.stop_reason is None
            and jax.process_index() == 0
        ):
            try:
                restoring.find_checkpoint(saver.root, "best", (self.monitor, self.mode))
            except CheckpointError as error:
                warnings.warn(str(error), stacklevel=2)

    @fg.hookimpl(specname="on_exception")
    def _save_on_exception(self, run: fg.Run, exception: BaseException) -> None:
        saver = self._fit.saver
        try:
            if saver is not None and isinstance(exception, Exception) and self.on_exception:
                self._last_save(saver, run, exception)
        finally:
            self._close()

    def _last_save(self, saver: Saver, run: fg.Run, exception: Exception) -> None:
        # What fails in one of several processes cannot be saved by all of them.
        if isinstance(exception, NonFiniteError | CheckpointError) or jax.process_count() > 1:
            return
        try:
            saver.save(run, wait=True)
        except StateError as error:
            warnings.warn(
                f"nothing is saved after {type(exception).__name__}: {error}", stacklevel=2
            )

    def _root(self, engine: EngineView) -> Path | None:
        if self.directory is not None:
            root = resolve_root(self.directory)
            return (
                root.absolute() if isinstance(root, Path) else root
            )  # the program may change its working directory
        directory = get_run_directory(engine)
        return None if directory is None else directory.path

    def _set_aside(self, run: fg.Run, step: int | None) -> Path | None:
        """Moves what is later than `step`, or everything, out of the way, where the engine does
        not, which knows the run's directory alone; gives where to."""
        root, directory = self._root(run.engine), run.run_dir
        if root is None or jax.process_index() or (directory is not None and directory.is_at(root)):
            return None
        try:
            return None if run.engine.fast_dev_run is not None else supersede(root, step)
        except OSError as error:
            raise CheckpointError(
                f"later checkpoints in {root} cannot be moved to superseded/: {error}"
            ) from error

    def _check_data(self, run: fg.Run) -> None:
        if self.resume_data == "restart" or run.data_iterator.is_exact:
            return
        if not run.data_iterator.is_resumable:
            raise ConfigurationError(
                "no run could go on in the middle of this data: it is an iterator, which can be "
                "gone through once, or "
                "has get_state() and set_state() and is cut off by Engine(limit_train_batches=). "
                "Pass what can be iterated again, without "
                "a limit, or choose Checkpointer(resume_data='restart') (not exact)"
            )
        if self.resume_data == "exact":
            raise ConfigurationError(
                "the data has no get_state() and set_state(), so that a resumed run could see "
                "other batches than an "
                "uninterrupted one. Give it both, pass a list or fg.ArrayData, or choose "
                "Checkpointer(resume_data="
                "'replay') (the batches already seen are read again and skipped) or 'restart' (not "
                "exact)"
            )

    def _close(self) -> None:
        saver, self._fit.saver, self._fit.read = self._fit.saver, None, None
        if saver is not None:
            saver.close()


def _prepare(root: Path, step: int) -> None:
    """Makes the folder for checkpoints and ends what an earlier process left in it; an error if
    that cannot be done."""
    folder = format.get_checkpoint_folder(root)
    arrays.check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(folder, Path) and not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
        recover(root, step)
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {root}: {error}. Make it writable, or choose "
            f"another place"
        ) from error


def _note_sinks(run: fg.Run, kept: Read) -> None:
    """Sinks may come and go; whose records have a gap is said."""
    now = {hook.plugin.name for hook in run.engine.plugins.implementations("flush_logger")}
    for name in sorted(now ^ kept.positions.keys()):
        gap = (
            "was not active when the checkpoint was saved: it may lack earlier records"
            if name in now
            else "is gone"
        )
        run.log_text(
            "checkpoints", {"message": f"sink {name!r} {gap}, step {run.step}"}, stream="telemetry"
        )


def _check_entry(entry: Entry, verify: Verify) -> int:
    kept = restoring.read_checkpoint(entry, verify)
    if verify != "none":
        format.verify(kept.path, kept.commit, verify)
    return entry.step


_CHOICES = {
    "mode": ("max", "min"),
    "verify": ("full", "size", "none"),
    "on_missing_plugin": ("error", "warn", "ignore"),
    "resume_data": ("exact", "replay", "restart"),
}
