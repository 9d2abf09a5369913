"""Which checkpoints stay, and how the others go."""

from dataclasses import dataclass
from pathlib import Path

from fulgurite.errors import CheckpointError

from fulgurite_checkpoint.format import (
    LEFT,
    STEP,
    Commit,
    Entry,
    complete_saving,
    find_best,
    get_checkpoint_folder,
    is_link,
    list_entries,
    sync,
)


@dataclass(frozen=True)
class RetentionPolicy:
    """Keeps the newest `keep` checkpoints (all if None), those whose step is a multiple of
    `keep_every`, and the best by the metric `best`."""

    keep: int | None
    keep_every: int | None
    best: str | None
    mode: str

    def select_superfluous(self, found: list[Entry]) -> list[Entry]:
        """Those of the complete checkpoints that need not stay, oldest first."""
        complete = [entry for entry in found if entry.commit]
        newest = complete if self.keep is None else complete[-self.keep :]
        best = find_best(complete, self.best, self.mode) if self.best else None
        stays = {entry.step for entry in newest} | ({best.step} if best else set())
        if self.keep_every is not None:
            stays |= {entry.step for entry in complete if entry.step % self.keep_every == 0}
        return [entry for entry in complete if entry.step not in stays]

    def apply(self, root: Path) -> None:
        """Removes what need not stay of the run at `root`."""
        for entry in (
            () if self.keep is None else self.select_superfluous(list_entries(root))
        ):  # each commit is read
            remove(entry.path)


def publish(path: Path, commit: Commit) -> None:
    """Gives the complete checkpoint in `path` its name, in place of an earlier one of the same
    step."""
    target = path.with_name(f"step-{commit.step}")
    if is_link(target) or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target} is in the way, and no checkpoint of ours: move it away")
    trash = None
    if target.exists() and (target / "COMMIT").exists():
        trash = target.with_name(f"trash-{target.name}")
        clear(trash)
        target.rename(trash)
    elif target.exists():
        target.rename(target.with_name(f"damaged-{target.name}-{commit.attempt}"))
    path.rename(target)
    sync(target.parent)
    if trash is not None:
        clear(trash)


def recover(root: Path, step: int) -> None:
    """Ends what an earlier process of the run at `root` was in the middle of. Only for the run's
    own process, which goes on from `step`."""
    folder = get_checkpoint_folder(root)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if not LEFT.fullmatch(path.name) or is_link(path) or not path.is_dir():
            continue
        commit = complete_saving(path)
        if commit is not None and commit.step <= step:
            publish(path, commit)
        else:
            clear(path)


def list_later(root: Path, step: int | None) -> list[Entry]:
    """What a run that goes on from `step`, or from nothing, leaves behind, the newest first."""
    found = [entry for entry in reversed(list_entries(root)) if step is None or entry.step > step]
    return [entry for entry in found if (entry.path / "COMMIT").exists()]


def supersede(root: Path, step: int | None) -> Path | None:
    """Moves what is later than `step`, or everything, out of the way of the run at `root`, the
    newest first; where to, if there was anything."""
    if not (later := list_later(root, step)):
        return None
    folder = root / "superseded"
    if is_link(folder):
        raise CheckpointError(
            f"{folder} is a link, of which a run directory has none: put the folder itself there"
        )
    taken = (
        [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        if folder.is_dir()
        else []
    )
    target = folder / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    if not isinstance(
        target, Path
    ):  # a remote folder is there with its first file, and nothing moves into none
        (target / "LEFT").write_text(f"by a run that goes on from step {step}\n")
    for entry in later:
        entry.path.rename(target / entry.path.name)
    return target


def remove(path: Path) -> None:
    """Removes a checkpoint: renamed first, so that what is half removed is no checkpoint any
    more."""
    if STEP.fullmatch(path.name) and not is_link(path) and (path / "COMMIT").is_file():
        trash = path.with_name(f"trash-{path.name}")
        clear(trash)
        path.rename(trash)
        clear(trash)


def clear(path: Path) -> None:
    """Removes a directory in which a checkpoint was being written or removed, if it is there."""
    if is_link(path) or (path.exists() and not (LEFT.fullmatch(path.name) and path.is_dir())):
        raise CheckpointError(f"{path} is in the way, and nothing of ours: move it away")
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
