"""Which checkpoints stay, and how the others go."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulgurite.errors import CheckpointError
from fulgurite_runs import is_link, supersede

from fulgurite_checkpoint.files import sync
from fulgurite_checkpoint.format import (
    STEP_NAME,
    UNFINISHED_NAME,
    Commit,
    Entry,
    Monitor,
    find_best,
    get_checkpoint_folder,
    list_entries,
    read_replacing_commit,
)

Leftovers = dict[Path, str]
"""Folders that could not be removed, and why not: the others were."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Which of the complete checkpoints stay.

    Attributes:
        max_to_keep: how many of the newest; None for all.
        keep_period: those whose step is a multiple of this stay too.
        best_by: the metric `SOURCE/NAME` by which the best stays, and whether the largest (`max`)
            or the smallest (`min`) is the best, or None for a comparison that checkpoints record;
            None for none.
    """

    max_to_keep: int | None
    keep_period: int | None
    best_by: Monitor | None

    def select_superfluous(self, entries: list[Entry]) -> list[Entry]:
        """Return the complete checkpoints that need not stay, oldest first."""
        complete = [entry for entry in entries if entry.commit]
        newest = complete if self.max_to_keep is None else complete[-self.max_to_keep :]
        stays = {entry.step for entry in newest}
        best = find_best(complete, *self.best_by) if self.best_by else None
        if best is not None:
            stays.add(best.step)
        if self.keep_period is not None:
            stays |= {entry.step for entry in complete if entry.step % self.keep_period == 0}
        return [entry for entry in complete if entry.step not in stays]

    def apply(self, root: Path, best: Entry | None = None) -> Leftovers:
        """Remove what need not stay of a run; return what could not be removed.

        Args:
            root: of the checkpoints.
            best: one that stays in any case: the best by a comparison that no checkpoint records.
        """
        if self.max_to_keep is None:
            return {}  # listing would read each commit for nothing
        leftovers: Leftovers = {}
        superfluous = self.select_superfluous(list_entries(root))
        for entry in superfluous:
            if best is not None and entry.step == best.step:
                continue
            leftovers |= _try_to(remove, entry.path)
        return leftovers


def publish(path: Path, commit: Commit) -> Leftovers:
    """Give the complete checkpoint in `path` its name, in place of an earlier one of the same step;
    return what could not be removed of that one.

    Args:
        path: the folder in which it was written.
        commit: what its `COMMIT` holds.
    """
    target = path.with_name(f"step-{commit.step}")
    if is_link(target) or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"{target} is not a checkpoint, and a checkpoint needs that name: move it away"
        )
    trash = None
    if target.exists() and (target / "COMMIT").exists():
        trash = target.with_name(f"trash-{target.name}")
        clear(trash)
        target.rename(trash)
    elif target.exists():
        target.rename(target.with_name(f"damaged-{target.name}-{commit.attempt}"))
    path.rename(target)
    sync(target.parent)
    return {} if trash is None else _try_to(clear, trash)


def recover(root: Path, step: int) -> Leftovers:
    """Complete or remove what an earlier process of a run was writing or removing; return what
    could not be removed.

    Args:
        root: of the run, whose own process alone calls this.
        step: that the run resumes from.
    """
    folder = get_checkpoint_folder(root)
    leftovers: Leftovers = {}
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if not UNFINISHED_NAME.fullmatch(path.name) or is_link(path) or not path.is_dir():
            continue
        commit = read_replacing_commit(path)
        if commit is not None and commit.step <= step:
            leftovers |= publish(path, commit)
        else:
            leftovers |= _try_to(clear, path)
    return leftovers


def list_later(root: Path, step: int | None) -> list[Entry]:
    """Return the complete checkpoints that a run leaves behind, the newest first.

    Args:
        root: of the run.
        step: that the run resumes from; None if from nothing.
    """
    later = [entry for entry in reversed(list_entries(root)) if step is None or entry.step > step]
    return [entry for entry in later if (entry.path / "COMMIT").exists()]


def supersede_later(root: Path, step: int | None) -> Path | None:
    """Move later checkpoints out of the way of a run, the newest first; return where to, or None
    if there were none.

    Args:
        root: of the run.
        step: that the run resumes from; None if from nothing, so that all move.
    """
    later = list_later(root, step)
    return supersede(root, [entry.path for entry in later]) if later else None


def remove(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, so that what is removed in part is not a checkpoint any more.
    """
    if STEP_NAME.fullmatch(path.name) and not is_link(path) and (path / "COMMIT").is_file():
        trash = path.with_name(f"trash-{path.name}")
        clear(trash)
        path.rename(trash)
        clear(trash)


def _try_to(function: Callable[[Path], None], path: Path) -> Leftovers:
    """Call a function that removes a path, and return that with the reason if it cannot."""
    try:
        function(path)
    except (OSError, CheckpointError) as error:
        return {path: str(error)}
    return {}


def clear(path: Path) -> None:
    """Remove a directory in which a checkpoint was being written or removed, if it is there."""
    is_ours = UNFINISHED_NAME.fullmatch(path.name) and path.is_dir()
    if is_link(path) or (path.exists() and not is_ours):
        raise CheckpointError(
            f"{path} was not written by a Checkpointer, which needs that name: move it away"
        )
    if not isinstance(path, Path):
        path.rmtree(missing_ok=True)  # a remote folder is gone with its last file
    elif path.exists():
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not is_link(child):
            _remove_tree(child)
        else:
            child.unlink()
    path.rmdir()
