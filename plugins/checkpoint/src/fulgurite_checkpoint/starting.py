"""What a fit does before its first save: it looks at its data, its folder and its loggers."""

import os
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import BatchIterator

from fulgurite_checkpoint import arrays, format
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.retention import Leftovers, recover


def check_data(batches: BatchIterator) -> None:
    """Raise `ConfigurationError` for data of which nobody knows whether a run can resume."""
    if batches.resume is not None:
        return
    if not batches.is_resumable:
        raise ConfigurationError(
            "no run could resume in the middle of this data: it is an iterator, which can be used "
            "up once, or has get_state() and set_state() and is cut off by "
            "Engine(limit_train_batches=). Pass what can be iterated again, without a limit, or "
            "say fg.DataSource(data, resume='restart') (not exact)"
        )
    raise ConfigurationError(
        f"nothing is known of how a run resumes in the middle of this data "
        f"({batches.description}), so that it could see other batches than an uninterrupted one. "
        "Pass fg.ArrayData, a list, or a source with get_state() and set_state(); or say "
        "fg.DataSource(data, resume='replay') if each pass over it is the same (the batches "
        f"already seen are read again and skipped), or resume='restart' (not exact). "
        f"{batches.resume_hint}".rstrip()
    )


def prepare_folder(root: Path, step: int) -> Leftovers:
    """Create the folder for checkpoints, and complete or remove what an earlier process left in it;
    return what could not be removed.

    Args:
        root: of the run.
        step: that the fit begins with.

    Raises:
        CheckpointError: it cannot be written.
    """
    folder = format.get_checkpoint_folder(root)
    arrays.check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(folder, Path) and not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
        return recover(root, step)
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {root}: {error}. Make it writable, or choose "
            f"another place"
        ) from error


def list_metrics(
    run: fg.Run, checkpoint: SavedCheckpoint | None
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return what was measured at the step of a run, by source, with the step.

    If nothing comes after that step, it is saved again, with these metrics.

    Args:
        run: the run.
        checkpoint: from which it resumes, if it does.
    """
    if checkpoint is None or checkpoint.commit.step != run.step:
        return {}
    return {source: (run.step, values) for source, values in checkpoint.commit.metrics.items()}


def report_changed_loggers(run: fg.Run, checkpoint: SavedCheckpoint) -> None:
    """Log which loggers were added or removed since a checkpoint, because their records have a
    gap."""
    active = {plugin.name for plugin in run.engine.plugins.hooks.flush_logger.plugins}
    for name in sorted(active ^ checkpoint.logger_positions.keys()):
        if name in active:
            change = "was not active when the checkpoint was saved: it may lack earlier records"
        else:
            change = "is gone"
        message = f"logger {name!r} {change}, step {run.step}"
        run.notify("checkpoints", message)
