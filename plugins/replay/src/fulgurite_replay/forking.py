"""New runs that begin in the middle of another one, with other settings."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import BatchIterator, get_split
from fulgurite_runs import make_origin, read_origin, write_origin

from fulgurite_replay.observing import Observer
from fulgurite_replay.rerun import Recorded, check_is_resumable, train_again
from fulgurite_replay.skipping import SkippedBatches, find_batch_numbers


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
    did; from its beginning if its data cannot continue from a checkpoint. `origin.json` of the new
    run names the other one and the step, and `fulgurite compare` shows them. A fork that was killed
    is continued by the same call.

    Args:
        recorded: the other run.
        step: at which the new one begins.
        changed: engine, model and data of the new run, and its directory.
        takes_hyperparameters: whether hyperparameters in the state of the optimizer are those of
            the new program, and not those of the other run.
        skipped_steps: batches that are left out, by the steps of the other run that trained on
            them. The batches after them come that much earlier. An epoch becomes shorter, so
            the same number of steps reaches further into the next one. What the other run leaves
            out itself, as a fork, stays left out.

    Raises:
        ConfigurationError: the other run does not reach the step or a batch to leave out, batches
            from before it are to be left out, or `limit_train_batches` is given as well; the new
            run would save where the other one does.
        CheckpointError: the new directory holds another run; the other run is a fork itself, and
            has no checkpoint up to the step; checkpoints of a third run are in the way.
    """
    check_is_resumable(changed.engine)
    steps = _check_skipped_steps(skipped_steps, step, changed.engine)
    before = recorded.skipped_batches
    skipped = tuple(sorted({*before, *find_batch_numbers(steps, before)}))
    directory = changed.directory
    changed.engine.run_dir = str(changed.path)
    _check_has_own_checkpoints(recorded, changed)
    if directory.num_attempts:
        _check_is_same_fork(recorded, step, changed, skipped)
        if changed.list_checkpoints():
            return changed.engine.fit(changed.model, changed.run_data, resume="auto")
    if skipped and changed.restarts_data:
        raise ConfigurationError(
            "no batch can be left out of this data: it begins again where a run resumes "
            "(DataSource(resume='restart')), and so does a fork"
        )
    start = step if step in recorded.list_resumable_steps() else recorded.find_start(step)
    with tempfile.TemporaryDirectory(prefix="fulgurite-fork-") as folder:
        path = recorded.checkpoint_root
        look = _Look(steps)
        if start != step or skipped:
            observer = Observer({step: look}, stop=step, saves=start != step)
            saved_in = Path(folder) / "run" if start != step else None
            end = train_again(recorded, start, observer, save_in=saved_in)
            if end < step:
                raise ConfigurationError(
                    f"the run has {end} steps: fork it at one of them, not at {step}"
                )
            path = saved_in or path
        if before:
            inner = look.position["source"]
            look.position, num_batches = inner["position"], inner["num_batches"]
        else:
            num_batches = step
        _check_epoch_continues(changed, look.position, num_batches, skipped)
        write_origin(directory.path, recorded.directory.path, step, skipped)
        data = changed.data
        if skipped:
            batches = SkippedBatches(changed.data, skipped, look.position, num_batches)
            # Its position is that of the other run's data, which it was made with.
            data = fg.DataSource(batches, resume="restart")
        return _continue(path, step, changed, data, takes_hyperparameters)


def count_steps(recorded: Recorded, changed: Recorded, skipped_steps: Sequence[int]) -> int | None:
    """Return how many steps a fork takes that leaves batches out and is as long as a number of
    epochs; None where it leaves none out, is counted in steps, or its epochs have no known length.

    Args:
        recorded: the other run.
        changed: the new run.
        skipped_steps: as of `fork`.
    """
    before = recorded.skipped_batches
    skipped = {*before, *find_batch_numbers(skipped_steps, before)}
    epochs = changed.engine.epochs
    length = _find_epoch_length(changed.data)
    if not skipped or epochs is None or length is None:
        return None
    num_batches = epochs * length
    return num_batches - sum(number <= num_batches for number in skipped)


def _find_epoch_length(data: Any) -> int | None:
    with BatchIterator(get_split(data, "train"), seed=0) as batches:
        return batches.epoch_length


class _Look:
    """Notes where the data of a run is, and refuses batches that it does not come to.

    Attributes:
        position: of the data at that step.

    Args:
        skipped_steps: the steps whose batches are to be left out.
    """

    def __init__(self, skipped_steps: Sequence[int]) -> None:
        self.position: Any = None
        self._skipped_steps = skipped_steps

    def __call__(self, run: fg.Run) -> None:
        """Look at a run."""
        self.position = run.snapshot().data_position
        stop = run.step_range.stop
        last = max(self._skipped_steps, default=0)
        if stop is not None and last > stop:
            raise ConfigurationError(
                f"the batch of step {last} cannot be left out: the run has {stop} steps"
            )


def _check_skipped_steps(
    skipped_steps: Sequence[int], step: int, engine: fg.Engine
) -> tuple[int, ...]:
    """Return the steps whose batches are left out, in order.

    Args:
        skipped_steps: as they were given.
        step: at which the fork begins.
        engine: of the fork.

    Raises:
        ConfigurationError: a fork at that step cannot leave them out.
    """
    steps = tuple(sorted(skipped_steps))
    if not steps:
        return ()
    if steps[0] < 1:
        raise ConfigurationError(
            f"the batch of step {steps[0]} cannot be left out: the first step is 1"
        )
    repeated = [number for number in steps if steps.count(number) > 1]
    if repeated:
        raise ConfigurationError(
            f"the batch of step {repeated[0]} is to be left out twice: name it once, and batches "
            "after it by the steps that they have in the run that is forked"
        )
    if steps[0] <= step:
        raise ConfigurationError(
            f"the batch of step {steps[0]} cannot be left out by a fork at step {step}: fork "
            f"before it, at step {steps[0] - 1}"
        )
    if engine.limit_train_batches is not None:
        raise ConfigurationError(
            "a run with limit_train_batches cannot leave batches out: its epochs could not resume"
        )
    return steps


def _check_epoch_continues(
    changed: Recorded, position: Any, num_batches: int, skipped: tuple[int, ...]
) -> None:
    """Raise `ConfigurationError` if all that is left of an epoch is to be left out: its end, by
    which a run in epochs ends, would be nowhere.

    Args:
        changed: the new run.
        position: in its data, where it begins.
        num_batches: how many batches come before.
        skipped: which of all batches are left out.
    """
    if not skipped or not position["batch"]:
        return
    length = _find_epoch_length(changed.data)
    if length is None:
        return
    last = num_batches + length - position["batch"]
    if set(range(num_batches + 1, last + 1)) <= {*skipped}:
        raise ConfigurationError(
            f"the batches of steps {num_batches + 1} to {last} are all that is left of an epoch: "
            "fork earlier"
        )


def _check_has_own_checkpoints(recorded: Recorded, changed: Recorded) -> None:
    """Raise `ConfigurationError` if a fork would save where the other run does: it would set those
    of that run aside."""
    root = changed.checkpoint_root
    if not recorded.directory.is_at(changed.path) and _is_same(root, recorded.checkpoint_root):
        raise ConfigurationError(
            f"the fork would save in {root}, where the checkpoints of {recorded.path} are: "
            "give its Checkpointer another directory=, or none, which is the directory of the run"
        )


def _is_same(first: Path, second: Path) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


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
