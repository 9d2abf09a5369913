"""One step of a run executed operation by operation, in the state and on the batch that it had."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, ConfigurationError, NonFiniteError
from fulgurite.plugins import (
    EngineView,
    Program,
    as_model_init,
    get_device_arrays,
    leaves_with_paths,
)
from jaxtyping import Array, Bool

from fulgurite_replay.capture_files import read_capture, read_state
from fulgurite_replay.examining import Examination, count_batch, examine
from fulgurite_replay.observing import Observer
from fulgurite_replay.proof import Difference, Proof, compare_records
from fulgurite_replay.rerun import NEVER, Recorded, train_again
from fulgurite_replay.rows import describe_batch, describe_example


@dataclass
class Replay:
    """What a step was found to do.

    Example:
        from fulgurite_replay import Replay

        print(Replay(step=38, start=30))

    Attributes:
        step: its number.
        start: the step of the checkpoint from which the steps before it were trained; 0 for the
            begin of the run; of a capture, the step before it.
        examination: what was found operation by operation.
        failed_when_compiled: whether the step is not finite as the run executes it.
        batch: the batch of the step.
        records: the exact records of the step, as far as anything is logged there.
        capture: the folder that `Capture` has written, if the step was replayed from it.
        source: where the data has the batch and the example that is concerned, as sentences; none
            where it does not know.
        difference: what of the records of the steps before it is not as the run has recorded it, so
            that the step may not have been in the same state.
        checks_numbers: whether it was looked at what is not finite, and not at indices alone.
    """

    step: int
    start: int
    examination: Examination = field(default_factory=Examination)
    failed_when_compiled: bool = False
    batch: Any = None
    records: list[fg.Record] = field(default_factory=list)
    capture: Path | None = None
    source: list[str] = field(default_factory=list)
    difference: Difference | None = None
    checks_numbers: bool = True

    def __str__(self) -> str:
        lines = [f"replayed from {self.capture or f'step {self.start}'}"]
        examination = self.examination
        if examination.is_expected_skip:
            lines.append(
                f"step {self.step} is left out: its gradients are too large for float16 and its "
                "losses are finite, as loss scaling expects from time to time"
            )
        elif examination.is_clean and not self.checks_numbers:
            lines.append(f"step {self.step}: no index is outside of an array")
            if self.failed_when_compiled:
                lines[-1] += ". The step is not finite: replay it without --check index"
        elif examination.is_clean and self.failed_when_compiled:
            lines.append(
                f"step {self.step} is not finite as it is compiled, and is finite operation by "
                "operation: XLA computes it in another order or in higher precision there. Look at "
                "sums and products of large numbers, and at what JAX_DEBUG_NANS=1 shows"
            )
        elif examination.is_clean:
            lines.append(f"step {self.step} is finite here")
        else:
            lines += [f"step {self.step}: {line}" for line in examination.describe()]
            lines += [f"  {line}" for line in self.source]
        if self.difference is not None:
            lines.append(
                f"note: the steps before it are not as recorded ({self.difference}), so that what "
                "the run did may be something else. Program, data or machine have changed, or it "
                "began with init_from"
            )
        return "\n".join(lines)


def replay(
    recorded: Recorded,
    step: int | None = None,
    *,
    checks_indices: bool = False,
    checks_numbers: bool = True,
) -> Replay:
    """Train a run up to a step, bit for bit, and execute that step operation by operation.

    Args:
        recorded: the run.
        step: the number of the step; None for the first one after the newest checkpoint that is not
            finite.
        checks_indices: whether to look for indices outside of arrays, which make no NaN.
        checks_numbers: whether to say what is not finite.

    Raises:
        CheckpointError: no step after the newest checkpoint fails; the run is a fork, and has no
            checkpoint to begin at.
        ConfigurationError: the run does not reach that step.
        DataError: the data cannot be read again from where the run is trained again.
    """
    if step is None:
        step = _find_failing_step(recorded)
    if step < 1:
        raise ConfigurationError(f"there is no step {step}: the first step is 1")
    start = recorded.find_start(step - 1)
    result = Replay(step, start or 0, checks_numbers=checks_numbers)
    observer = Observer(
        {step - 1: lambda run: _look_at_next_step(run, result, checks_indices=checks_indices)},
        stop=step,
    )
    try:
        train_again(recorded, start, observer)
    except NonFiniteError as error:
        if error.step < step:
            raise ConfigurationError(
                f"step {error.step} is not finite already: replay that one, --step {error.step}"
            ) from error
        result.failed_when_compiled = error.step == step
    if result.batch is None:
        raise ConfigurationError(
            f"the run ends before step {step}: give the number of a step that it has"
        )
    result.records = [record for record in observer.records if record.step == step]
    proof = Proof(result.start, step - 1)
    compare_records(proof, recorded, observer.records, is_whole=start is None)
    result.difference = next(iter(proof.differences), None)
    return result


def replay_capture(
    engine: fg.Engine,
    model: Any,
    path: Path,
    *,
    checks_indices: bool = False,
    checks_numbers: bool = True,
) -> Replay:
    """Execute a step that `Capture` has written operation by operation; neither the data of the run
    nor a checkpoint is needed.

    Args:
        engine: the engine of the run, or one that was made by the same program.
        model: the model, as `Engine.fit` got it.
        path: the folder of the capture, such as `RUN/captures/step-38`.
        checks_indices: whether to look for indices outside of arrays, which make no NaN.
        checks_numbers: whether to say what is not finite.

    Raises:
        CheckpointError: the capture is damaged, or of another program.
    """
    captured = read_capture(path)
    like = engine.init_state(model, [captured.batch])
    state, batch = read_state(path, captured.batch, like)
    step = captured.step
    model_init = as_model_init((state.module, state.model_state))
    program = Program(engine.services, model_init, (batch,), None)
    examination = examine(
        engine.services,
        program.update_rule.for_step(step - 1, captured.step_range),
        state,
        batch,
        _find_due(engine, step - 1, captured.step_range),
        checks_indices=checks_indices,
        checks_numbers=checks_numbers,
    )
    failed = examination.culprit is not None
    if examination.is_clean:
        # Only then is it of interest whether the compiled step is finite, too.
        after, _ = engine.step(state, batch, step_range=captured.step_range)
        failed = int(after.nonfinite.step) == step
    source = [] if captured.place is None else [captured.place]
    example = _get_example(examination, batch)
    if example is not None and example < len(captured.examples):
        source.append(f"the example is {captured.examples[example]}")
    return Replay(
        step,
        step - 1,
        examination,
        failed,
        batch,
        capture=path,
        source=source,
        checks_numbers=checks_numbers,
    )


def save_batch(batch: Any, path: Path) -> None:
    """Write the arrays of a batch by their paths into a file of NumPy, `.npz`.

    Numbers that NumPy does not know, such as bfloat16, are written as float32, without loss.

    Args:
        batch: a tree of arrays.
        path: of the file.
    """
    arrays = {}
    for name, leaf in leaves_with_paths({"batch": batch}):
        array = _as_storable(leaf)
        if array is not None:
            arrays[name] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # of its own, `savez` would append `.npz` to the name
        np.savez(file, **arrays)


def _find_failing_step(recorded: Recorded) -> int:
    """Return the first step after the newest checkpoint that is not finite."""
    start = recorded.find_start(NEVER)
    try:
        # A run may have skipped or ignored it. What differs is told when that step is replayed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = train_again(recorded, start, Observer({}), on_nonfinite="raise")
    except NonFiniteError as error:
        return error.step
    raise CheckpointError(
        f"every step of the run from {start or 0} to {end} is finite: name the one to look at, "
        "--step N"
    )


def _look_at_next_step(run: fg.Run, result: Replay, *, checks_indices: bool) -> None:
    """Execute the next step of a fit operation by operation.

    Args:
        run: the fit, before that step.
        result: gets what is found.
        checks_indices: whether to look for indices outside of arrays as well.
    """
    item = run.data_iterator.look_ahead(0)
    if item is None:
        return
    result.batch = fg.ArrayData.gather(get_device_arrays(run.data), item.batch)
    update_rule = run.update_rule.for_step(run.step, run.step_range)
    result.examination = examine(
        run.engine.services,
        update_rule,
        run.state,
        result.batch,
        _find_due(run.engine, run.step, run.step_range),
        checks_indices=checks_indices,
        checks_numbers=result.checks_numbers,
    )
    lines = [describe_batch(run, item)]
    example = _get_example(result.examination, result.batch)
    if example is not None:
        lines.append(describe_example(run, item, example))
    result.source = [line for line in lines if line is not None]


def _get_example(examination: Examination, batch: Any) -> int | None:
    """Return the index in the batch of the example that is concerned; None without one, and where
    it is one of a part of the batch."""
    example = examination.example
    return example[0] if example is not None and example[1] == count_batch(batch) else None


def _find_due(engine: EngineView, step: int, step_range: fg.StepRange) -> Bool[Array, " names"]:
    """Return what is due after the next step of a fit, in the order of `Services.due_names`.

    Args:
        engine: the engine.
        step: the number of updates before that step.
        step_range: of the fit.
    """
    services = engine.services
    due_names = {
        action.name
        for action in engine.actions
        if action.trigger.next(step, step_range) == step + 1
    }
    log_trigger = services.settings.log_trigger
    if log_trigger is not None and log_trigger.next(step, step_range) == step + 1:
        due_names.add("log")
    return jnp.asarray([name in due_names for name in services.due_names], bool)


def _as_storable(leaf: Any) -> np.ndarray | None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)
