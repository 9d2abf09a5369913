"""New runs that begin in the middle of another one, with other settings."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs import make_origin, read_origin, write_origin

from fulgurite_replay.rerun import Observer, Recorded, check_is_resumable, train_again
from fulgurite_replay.skipping import SkippedBatches


def fork(
    recorded: Recorded,
    step: int,
    changed: Recorded,
    *,
    takes_hyperparameters: bool = False,
    skipped_steps: Sequence[int] = (),
) -> fg.FitResult:
    """Train a new run that begins with the state that another one had at a step.

    Where that step was not saved, it is trained again from the checkpoint before it, as the run
    did. `origin.json` of the new run names the other one and the step, and `fulgurite compare`
    shows them. A fork that was killed is continued by the same call.

    Args:
        recorded: the other run.
        step: at which the new one begins.
        changed: engine, model and data of the new run, and its directory.
        takes_hyperparameters: whether hyperparameters in the state of the optimizer are those of
            the new program, and not those of the other run.
        skipped_steps: batches that are left out, by the steps of the other run that trained on
            them. The batches after them come that much earlier. An epoch becomes shorter, and a run
            of so many steps begins the next one.

    Raises:
        ConfigurationError: the other run does not reach the step, or batches from before it are to
            be left out, or `limit_train_batches` is given as well.
        CheckpointError: the new directory holds another run.
    """
    check_is_resumable(recorded.engine)
    skipped = tuple(sorted(set(skipped_steps)))
    if skipped and skipped[0] <= step:
        raise ConfigurationError(
            f"the batch of step {skipped[0]} cannot be left out by a fork at step {step}: fork "
            f"before it, at step {skipped[0] - 1}"
        )
    if skipped and changed.engine.limit_train_batches is not None:
        raise ConfigurationError(
            "a run with limit_train_batches cannot leave batches out: its epochs could not resume"
        )
    directory = changed.directory
    changed.engine.run_dir = str(changed.path)
    if directory.num_attempts:
        _check_is_same_fork(recorded, step, changed, skipped)
    if directory.list_checkpoints():
        data = SkippedBatches(changed.data, skipped) if skipped else changed.data
        return changed.engine.fit(changed.model, data, resume="auto")
    start = recorded.find_start(step)
    with tempfile.TemporaryDirectory(prefix="fulgurite-fork-") as folder:
        path = recorded.checkpoints.path
        positions: list[Any] = []
        if start != step or skipped:
            observer = Observer(
                {step: lambda run: positions.append(run.snapshot().data_position)},
                stop=step,
                saves=start != step,
            )
            saved_in = Path(folder) / "run" if start != step else None
            end = train_again(recorded, start, observer, save_in=saved_in)
            if end < step:
                raise ConfigurationError(
                    f"the run has {end} steps: fork it at one of them, not at {step}"
                )
            path = saved_in or path
        write_origin(directory.path, recorded.directory.path, step, skipped)
        data = changed.data
        if skipped:
            batches = SkippedBatches(changed.data, skipped, positions[0], step)
            # Its position is that of the other run's data, which it was made with.
            data = fg.DataSource(batches, resume="restart")
        return _continue(path, step, changed, data, takes_hyperparameters)


def _check_is_same_fork(
    recorded: Recorded, step: int, changed: Recorded, skipped: tuple[int, ...]
) -> None:
    """Raise `CheckpointError` if the new directory holds another run than this fork."""
    origin = read_origin(changed.directory.path)
    expected = make_origin(recorded.directory.path, step, skipped)
    if origin != expected:
        raise CheckpointError(
            f"{changed.directory.path} holds a run: give a new directory for the fork"
        )


def _continue(
    path: Path, step: int, changed: Recorded, data: Any, takes_hyperparameters: bool
) -> fg.FitResult:
    """Resume from a checkpoint of another run."""
    source = fg.CheckpointRef(
        path, step, hyperparameters="program" if takes_hyperparameters else "checkpoint"
    )
    return changed.engine.fit(changed.model, data, resume=source)
