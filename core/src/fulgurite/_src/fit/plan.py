"""The plan of a fit: everything that a loop begins with, from what was asked for."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.sources import (
    get_batch_examples,
    get_device_arrays,
    get_shared_batch_spec,
)
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.execution.program import Program
from fulgurite._src.execution.program_cache import ProgramCache
from fulgurite._src.fit.compiling import (
    StepPlan,
    choose_steps_per_execution,
    compile_first_step,
)
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.losses import choose_trials, try_losses, try_padding
from fulgurite._src.fit.request import FitRequest
from fulgurite._src.fit.snapshot import Resume, Snapshot, TrainingLength
from fulgurite._src.fit.start import (
    fill_missing_state,
    load_snapshot,
    select_hyperparameters,
)
from fulgurite._src.fit.without_effect import describe_what_has_no_effect
from fulgurite._src.sharding import FIT_START, ShardingStrategy
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.specs import hash_tree
from fulgurite._src.triggers import StepRange
from fulgurite._src.waits import Wait
from fulgurite.errors import (
    CheckpointError,
    DataError,
    error_context,
)


@dataclass(frozen=True, eq=False)
class FitPlan:
    """What a loop begins with.

    Attributes:
        program: the training program.
        data_iterator: where batches come from.
        state: to train from; consumed.
        step_range: its start is earlier than `state.step` in a resumed fit.
        requested_length: how long to train; with epochs, the end
            follows from the ends of epochs as far as they are known.
        steps_per_execution: the largest number of steps in one dispatch.
        device_arrays: the arrays that indexed batches are gathered from, where the step finds them,
            or None.
        resumed_from: the snapshot that the fit resumes from, or None.
        resume: what `fit(resume=...)` was.
        messages: what the user is told at the start.
        compilations: those that are done behind other work.
    """

    program: Program
    data_iterator: BatchIterator
    state: TrainState
    step_range: StepRange
    requested_length: TrainingLength
    steps_per_execution: int
    device_arrays: Any
    resumed_from: Snapshot | None
    resume: Resume
    messages: list[str]
    compilations: CompilationQueue


def plan_fit(
    engine: EngineView, programs: ProgramCache, request: FitRequest, stack: ExitStack
) -> FitPlan:
    """Return everything that a loop needs: its program, the state to train from, the batches.

    Args:
        engine: the engine that trains.
        programs: of the engine.
        request: what `fit` was asked for.
        stack: closes the batches when the fit ends.
    """
    services = engine.services
    data_iterator = stack.enter_context(
        open_data_iterator(services, request.data, request.start_step)
    )
    device_arrays = get_device_arrays(request.data)
    with services.timings.describe("reading the first batch"):
        first_batch = peek_first_batch(data_iterator, request.start_step)
    examples = get_batch_examples(request.data) or (first_batch,)
    with services.timings.describe("tracing"):
        program = programs.get(request.model_init, examples, device_arrays)
    _check_same_start(services, request, data_iterator, first_batch)
    sample, padded = choose_trials(request.data, program, first_batch)
    placed_arrays = engine.sharding.replicate(device_arrays)
    compilations = stack.enter_context(CompilationQueue())

    def plan_steps(snapshot: Snapshot | None) -> StepPlan:
        step_plan = _plan_steps(engine, request, program, snapshot, data_iterator.epoch_length)
        compile_first_step(engine, compilations, program, step_plan, first_batch, placed_arrays)
        return step_plan

    def announce(snapshot: Snapshot) -> None:
        # What is wrong with it is raised when it is read.
        with suppress(Exception):
            plan_steps(snapshot)

    state = request.state
    with Wait("the checkpoint"):
        snapshot = load_snapshot(engine, request.resume, program.state_spec, announce)
    if snapshot is not None:
        state = select_hyperparameters(request.resume, snapshot.state)
        data_iterator = _resume_data_iterator(services, request, snapshot, data_iterator, stack)
    step_plan = plan_steps(snapshot)
    del first_batch, examples  # a fit keeps no batch longer than its steps do
    state = fill_missing_state(engine, state, program, request.model_init, request.init_from)
    program.check(state)
    with services.timings.time("check"), services.timings.describe("checking losses and padding"):
        messages = try_losses(services, program, state, sample, device_arrays)
        messages += try_padding(services, program, state, padded, device_arrays)
        messages += describe_what_has_no_effect(services, request.data, program, state)
    _check_known_batches(engine.sharding, data_iterator, int(state.step), step_plan.step_range.stop)
    return FitPlan(
        program=program,
        data_iterator=data_iterator,
        state=state,
        step_range=step_plan.step_range,
        requested_length=request.length,
        steps_per_execution=step_plan.steps_per_execution,
        device_arrays=placed_arrays,
        resumed_from=snapshot,
        resume=request.resume,
        messages=messages,
        compilations=compilations,
    )


def open_data_iterator(
    services: Services, data: Any, start_step: int, position: Any = None, **options: Any
) -> BatchIterator:
    """Return the batches of a fit.

    Args:
        services: of the engine.
        data: the data source of training.
        start_step: the step at which the fit begins, before any resume.
        position: in the data, of a snapshot; None for the beginning.
        options: further arguments of `BatchIterator`.
    """
    settings = services.settings
    # A later fit is another pass over the data; a resumed one keeps its start and with it the
    # order.
    seed = (settings.seed, start_step) if start_step else settings.seed
    return BatchIterator(
        data,
        seed=seed,
        position=position,
        limit=settings.limit_train_batches,
        process=services.sharding.process_shard(lambda: get_shared_batch_spec(data)),
        **options,
    )


def peek_first_batch(data_iterator: BatchIterator, start_step: int) -> Any:
    """Return the first batch, which stays the next one.

    Args:
        data_iterator: of a fit.
        start_step: the step at which it begins.
    """
    with error_context(
        lambda: f"while {data_iterator.label} made the batch for step {start_step + 1}"
    ):
        return data_iterator.peek()


def _check_same_start(
    services: Services, request: FitRequest, data_iterator: BatchIterator, first_batch: Any
) -> None:
    """Check that all processes train the same thing.

    Args:
        services: of the engine.
        request: what `fit` was asked for.
        data_iterator: of the fit.
        first_batch: the first of them.
    """
    settings = services.settings
    steps, epochs = request.length

    def describe() -> dict[str, Any]:
        arrays = request.model_init.arrays if request.state is None else request.state
        return {
            "seed": settings.seed,
            "limit_train_batches": settings.limit_train_batches,
            "on_nonfinite": settings.on_nonfinite,
            "steps_per_execution": request.steps_per_execution,
            "steps": steps,
            "epochs": epochs,
            "batches an epoch": data_iterator.epoch_length,
            "arrays": hash_tree(arrays),
        }

    services.sharding.check_same(FIT_START, describe, first_batch)


def _resume_data_iterator(
    services: Services,
    request: FitRequest,
    snapshot: Snapshot,
    data_iterator: BatchIterator,
    stack: ExitStack,
) -> BatchIterator:
    """Return the batches from the position of a snapshot on; those that begin afresh where it has
    no position, or none that counts.

    Args:
        services: of the engine.
        request: what `fit` was asked for.
        snapshot: what the fit resumes from.
        data_iterator: that begins afresh.
        stack: closes the batches when the fit ends.
    """
    has_position = snapshot.data_position is not None or data_iterator.is_shared
    if not has_position or data_iterator.resume == "restart":
        return data_iterator
    data_iterator.close()
    start, position = snapshot.step_range.start, snapshot.data_position
    with error_context(lambda: f"the run's data was {snapshot.data or 'not noted'}"):
        return stack.enter_context(open_data_iterator(services, request.data, start, position))


def _plan_steps(
    engine: EngineView,
    request: FitRequest,
    program: Program,
    snapshot: Snapshot | None,
    epoch_length: int | None,
) -> StepPlan:
    """Return the steps that a fit is to take, and how many of them make a dispatch.

    Args:
        engine: the engine that trains.
        request: what `fit` was asked for.
        program: the training program.
        snapshot: what the fit resumes from, whose arrays need not be read yet, or None.
        epoch_length: the number of batches in an epoch, as far as it is known.
    """
    step = start = request.start_step
    steps, epochs = request.length
    if snapshot is not None:
        step, start = int(snapshot.state.step), snapshot.step_range.start
        if engine.fast_dev_run is not None:
            steps = step - start + engine.fast_dev_run
    step_range = _plan_step_range(snapshot, start, steps, epochs, epoch_length)
    steps_per_execution = choose_steps_per_execution(
        engine, program, request.steps_per_execution, step, step_range, epoch_length
    )
    return StepPlan(step, step_range, steps_per_execution)


def _plan_step_range(
    snapshot: Snapshot | None,
    start: int,
    steps: int | None,
    epochs: int | None,
    epoch_length: int | None,
) -> StepRange:
    """Return the steps that a fit is to take.

    A resumed fit keeps its range, unless another length is requested than before.

    Args:
        snapshot: what the fit resumes from, or None.
        start: the step at which the fit began, before any resume.
        steps: the number of steps of the whole fit, or None.
        epochs: the number of epochs of the whole fit, or None.
        epoch_length: the steps of the first epoch, as far as they are known.

    Raises:
        CheckpointError: the snapshot is past the end of the fit.
    """
    if snapshot is not None and snapshot.requested_length in (None, (steps, epochs)):
        return snapshot.step_range
    epoch_ends = snapshot.step_range.epoch_ends if snapshot else ()
    stop = None
    if steps is not None:
        stop = start + steps
    elif epochs is not None:
        stop = _find_end_of_epoch(epochs, start, epoch_ends, epoch_length)
    if snapshot is not None and stop is not None:
        step = int(snapshot.state.step)
        # The fit would return a model with more steps than requested, and the run would never be
        # marked as complete.
        if step > stop:
            raise CheckpointError(
                f"the checkpoint of step {step} is past step {stop}, where this fit should end: "
                f"ask for more, resume from an earlier one, or start afresh: resume='never', or "
                f"another run directory"
            )
    return StepRange(start, stop, epoch_ends)


def _check_known_batches(
    sharding: ShardingStrategy, data_iterator: BatchIterator, step: int, stop: int | None
) -> None:
    """Raise `DataError` if a batch that the fit will come to does not divide by the devices, as far
    as that is known before it is read.

    Args:
        sharding: of the engine.
        data_iterator: of the fit.
        step: that of the state which the fit begins with.
        stop: the last step of the fit, as far as it is known.
    """
    if sharding.mesh is None:
        return
    failure = None
    for number, batch in data_iterator.iter_known_batches():
        if stop is not None and step + number >= stop:
            continue
        try:
            sharding.check_batch(batch, f"the batch for step {step + number + 1}")
        except DataError as error:
            failure = error
            break
    sharding.raise_on_any_process(failure)


def _find_end_of_epoch(
    epochs: int, start: int, epoch_ends: tuple[int, ...], epoch_length: int | None
) -> int | None:
    """Return the step at which the last of a number of epochs ends, as far as that is known."""
    if epochs <= len(epoch_ends):
        return epoch_ends[epochs - 1]
    if epoch_ends:
        *_, before, last = (start, *epoch_ends)
        return last + (epochs - len(epoch_ends)) * (last - before)
    return None if epoch_length is None else start + epochs * epoch_length
