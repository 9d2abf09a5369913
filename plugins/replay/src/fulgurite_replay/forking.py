"""New runs that begin in the middle of another one, with other settings."""

import tempfile
from pathlib import Path

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs import write_origin

from fulgurite_replay.rerun import Observer, Recorded, check_is_resumable, train_again


def fork(
    recorded: Recorded, step: int, changed: Recorded, *, takes_hyperparameters: bool = False
) -> fg.FitResult:
    """Train a new run that begins with the state that another one had at a step.

    Where that step was not saved, it is trained again from the checkpoint before it, as the run
    did. `origin.json` of the new run names the other one and the step, and `fulgurite compare`
    shows them.

    Args:
        recorded: the other run.
        step: at which the new one begins.
        changed: engine, model and data of the new run, and its directory.
        takes_hyperparameters: whether hyperparameters in the state of the optimizer are those of
            the new program, and not those of the other run.

    Raises:
        ConfigurationError: the other run does not reach the step.
        CheckpointError: the new directory holds a run.
    """
    check_is_resumable(recorded.engine)
    directory = changed.directory
    if directory.num_attempts:
        raise CheckpointError(f"{directory.path} holds a run: give a new directory for the fork")
    changed.engine.run_dir = str(changed.path)
    start = recorded.find_start(step)
    if start == step:
        write_origin(directory.path, recorded.directory.path, step)
        return _continue(recorded.checkpoints.path, step, changed, takes_hyperparameters)
    with tempfile.TemporaryDirectory(prefix="fulgurite-fork-") as folder:
        path = Path(folder) / "run"
        end = train_again(recorded, start, Observer({}, stop=step, saves=True), save_in=path)
        if end < step:
            raise ConfigurationError(
                f"the run has {end} steps: fork it at one of them, not at {step}"
            )
        write_origin(directory.path, recorded.directory.path, step)
        return _continue(path, step, changed, takes_hyperparameters)


def _continue(
    path: Path, step: int, changed: Recorded, takes_hyperparameters: bool
) -> fg.FitResult:
    """Resume from a checkpoint of another run."""
    source = fg.CheckpointRef(
        path, step, hyperparameters="program" if takes_hyperparameters else "checkpoint"
    )
    return changed.engine.fit(changed.model, changed.data, resume=source)
