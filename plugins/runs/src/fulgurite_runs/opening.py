"""Opening the run directory for a fit: the lock, the attempt, and the completion mark."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite.plugins import EngineView

from fulgurite_runs.beginning import find_beginning
from fulgurite_runs.directory import RunDirectory
from fulgurite_runs.json_codec import dumps
from fulgurite_runs.manifest import build_manifest

_DIRECTORIES: "WeakKeyDictionary[EngineView, tuple[Any, RunDirectory]]" = WeakKeyDictionary()


class RunPlugin(fg.Plugin):
    """A plugin that writes into the run directory, which is open for the whole fit, or that needs
    the description of the run, `run.manifest`.

    Example:
        from fulgurite_runs import RunPlugin


        class Notes(RunPlugin):
            @fg.hookimpl
            def on_fit_end(self, run):
                run.run_dir.assert_locked()
                (run.run_dir.path / "notes.txt").write_text(f"ended at step {run.step}")


        engine = fg.Engine(steps=100, run_dir="runs/digits", plugins=[Notes()])
    """

    @fg.hookimpl
    def fit_context(self, run: fg.Run) -> AbstractContextManager[None]:
        """Open the run directory, unless another plugin has done it."""
        return open_run(run)


def get_run_directory(engine: EngineView) -> RunDirectory | None:
    """Return the run directory of an engine, or None if it has none.

    A relative path is resolved at the first call, at the latest when the first fit begins, and
    stays: the program may change its working directory.
    """
    if engine.run_dir is None:
        return None
    path, directory = _DIRECTORIES.get(engine, (None, None))
    if directory is None or path != engine.run_dir:
        directory = RunDirectory(engine.run_dir)
        _DIRECTORIES[engine] = (engine.run_dir, directory)
    return directory


@contextmanager
def open_run(run: fg.Run) -> Iterator[None]:
    """Describe the run in `run.manifest`, lock its directory and start an attempt there; at the
    end of a fit that reached its planned end, mark the run as complete.

    Nothing happens where another plugin has done it. A run without a directory, and a
    `fast_dev_run`, are only described.

    Raises:
        CheckpointError: another process writes there, it cannot be written, it holds checkpoints
            that the fit does not resume from, or another fit began since the checkpoint was read.
    """
    if run.manifest is not None:
        yield
        return
    run.set_manifest(build_manifest(run))
    began = {"began": find_beginning(run.timings), "fit_began": time.time() - run.timings.total}
    directory = get_run_directory(run.engine)
    if directory is None or run.engine.fast_dev_run is not None:
        yield
        return
    sync = run.engine.sharding.sync
    with ExitStack() as stack:
        # The first process locks and writes; the others get its number, or its error.
        sync.broadcast(lambda: stack.enter_context(directory.lock()))
        attempt = sync.broadcast(lambda: _start_attempt(run, directory, began))
        run.set_run_dir(directory, attempt)
        yield
        if run.is_complete:
            sync.broadcast(lambda: _mark_complete(run, directory))


def _start_attempt(run: fg.Run, directory: RunDirectory, began: dict[str, float]) -> int:
    """Note an attempt and return its number.

    Args:
        run: the run.
        directory: of it.
        began: when the attempt and its fit began, in seconds since 1970, by name.
    """
    snapshot = run.resumed_from
    manifest = dumps({**run.manifest, **began, "start_step": run.step})
    if snapshot is not None:
        is_same_run = snapshot.run_dir is None or directory.is_at(snapshot.run_dir)
        if is_same_run:
            _check_no_other_attempt(directory, snapshot)
        # What the fit resumes from stays.
        step = run.step if is_same_run else None
        return directory.start_attempt(manifest, step, snapshot.is_latest)
    if run.resume != "never":
        _check_no_later_checkpoints(run, directory)
    # So does what the former fit left, where this one continues from its state.
    step = run.step if run.step > 0 and run.resume != "never" else None
    return directory.start_attempt(manifest, step)


def _check_no_other_attempt(directory: RunDirectory, snapshot: fg.Snapshot) -> None:
    # The checkpoint was read before the lock was taken.
    if snapshot.num_attempts not in (None, directory.num_attempts):
        raise CheckpointError(
            f"another fit began in {directory.path} since the checkpoint to resume from was read: "
            f"start again, to resume from what it has left"
        )


def _check_no_later_checkpoints(run: fg.Run, directory: RunDirectory) -> None:
    # Their records would be there twice.
    checkpoints = directory.list_checkpoints()
    continued_step = run.step if run.step > 0 else -1
    if checkpoints and checkpoints[-1][0] > continued_step:
        raise CheckpointError(
            f"{directory.path} holds checkpoints, the newest of step {checkpoints[-1][0]}: resume "
            f"with fit(resume='auto'), start afresh with fit(resume='never'), which sets them "
            f"aside, or choose another run directory"
        )


def _mark_complete(run: fg.Run, directory: RunDirectory) -> None:
    try:
        directory.mark_complete()
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # What was trained is worth more than the mark.
        run.report_failure("fulgurite", "the run is not marked as complete", error)
