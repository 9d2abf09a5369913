"""A directory that holds checkpoints alone: whose they are, and who may write there."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite_runs import RunDirectory, expand_path

from fulgurite_checkpoint.format import Entry
from fulgurite_checkpoint.retention import list_later


def get_run_path(directory: RunDirectory | None) -> str | None:
    """Return the path by which a checkpoint knows its run; None for a run without a directory."""
    return None if directory is None else str(directory.path)


def is_resumed_from(root: Path, run: fg.Run) -> bool:
    """Return whether a run resumes from a checkpoint of which the user has named the directory.

    Args:
        root: a directory of checkpoints.
        run: the run.
    """
    path = None if run.resumed_from is None else run.resumed_from.run_dir
    if path is None:
        return False
    text = expand_path(path)
    if not isinstance(root, Path):
        return os.fspath(root) == text.rstrip("/")
    return os.path.realpath(root) == os.path.realpath(text)


def check_unused(root: Path | None, directory: RunDirectory | None) -> None:
    """Raise `CheckpointError` if another process of this machine writes to one of the directories.

    Args:
        root: of the checkpoints, if there is one.
        directory: of the run, if it has one.
    """
    if directory is not None:
        directory.check_unused()
    if isinstance(root, Path):
        RunDirectory(root).check_unused()


def check_owner(entries: Iterable[Entry], directory: RunDirectory | None) -> None:
    """Raise `CheckpointError` if a checkpoint is another run's, which may still need it.

    One that does not know its run, as of a run without a directory or of an earlier version, is
    anybody's.

    Args:
        entries: checkpoints.
        directory: of the run that would resume from them or move them; None if it has none.
    """
    for entry in entries:
        owner = None if entry.commit is None else entry.commit.run
        if owner is None or (directory is not None and _is_same(directory.path, owner)):
            continue
        this_run = "this run has no run_dir"
        if directory is not None:
            this_run = f"this is the run {str(directory.path)!r}"
        folder = entry.path.parent.parent
        raise CheckpointError(
            f"{entry.path} is a checkpoint of the run {owner!r}, and {this_run}: neither may "
            "resume from those of the other, or remove them. Give each run another "
            f"Checkpointer(directory=...). If that run was moved here, fit(resume={str(folder)!r}) "
            "continues it"
        )


def list_own(root: Path, directory: RunDirectory) -> list[tuple[int, Path]]:
    """Return steps and directories of the complete checkpoints of a run, oldest first.

    Args:
        root: the directory that holds `checkpoints/`, the run's or another one.
        directory: of the run.

    Raises:
        CheckpointError: one of them is another run's.
    """
    entries = list_later(root, None)
    if not directory.is_at(root):
        check_owner(entries, directory)
    return [(entry.step, entry.path) for entry in reversed(entries)]


def _is_same(path: Path, owner: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(owner)


@contextmanager
def lock_directory(run: fg.Run, root: Path | None) -> Iterator[RunDirectory | None]:
    """Be the only writer to a directory of checkpoints, and yield it.

    Nothing is locked where the directory is the run's, which is locked already, or remote, where
    there are no locks.

    Args:
        run: the run.
        root: the directory; None if the run saves nowhere.

    Raises:
        CheckpointError: another fit writes there, or has since the checkpoint was read from which
            this one resumes.
    """
    is_of_run = root is not None and run.run_dir is not None and run.run_dir.is_at(root)
    is_trial = run.engine.fast_dev_run is not None
    if not isinstance(root, Path) or is_of_run or is_trial:
        yield None
        return
    directory = RunDirectory(root)
    with ExitStack() as stack:
        # The first process locks, and the others get its error.
        run.engine.sharding.sync.broadcast(lambda: stack.enter_context(directory.lock()))
        snapshot = run.resumed_from
        if snapshot is not None and snapshot.run_dir is None and snapshot.is_latest:
            _check_none_later(root, run.step)
        yield directory


def _check_none_later(root: Path, step: int) -> None:
    if list_later(root, step):
        raise CheckpointError(
            f"another fit has saved checkpoints in {root} since the one to resume from was read: "
            f"start again, to resume from what it has left"
        )
