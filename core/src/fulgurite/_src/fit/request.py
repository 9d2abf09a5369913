"""What a fit is asked for, checked as far as it can be before a batch is read."""

from dataclasses import dataclass
from typing import Any

from fulgurite._src.data.sources import get_split
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.snapshot import InitFrom, Resume, TrainingLength
from fulgurite._src.fit.start import check_starting_point
from fulgurite._src.training.settings import StepsPerExecution, check_steps_per_execution
from fulgurite._src.training.state import ModelInit, TrainState, as_model_init, check_not_consumed
from fulgurite.errors import ConfigurationError, StateError, as_int


@dataclass(frozen=True, eq=False)
class FitRequest:
    """What `Engine.fit` was asked for.

    Attributes:
        model_init: where the module comes from.
        data: the data source of training.
        state: a state to continue from, or None.
        start_step: the step of that state, else 0.
        length: how long to train.
        steps_per_execution: the largest number of steps in one dispatch; `auto` to choose it.
        resume: the argument of `fit`.
        init_from: the argument of `fit`.
    """

    model_init: ModelInit
    data: Any
    state: TrainState | None
    start_step: int
    length: TrainingLength
    steps_per_execution: StepsPerExecution
    resume: Resume
    init_from: InitFrom


def check_request(
    engine: EngineView,
    model: Any,
    data: Any,
    state: TrainState | None,
    *,
    steps: int | None,
    epochs: int | None,
    steps_per_execution: StepsPerExecution | None,
    resume: Resume,
    init_from: InitFrom,
) -> FitRequest:
    """Return what `Engine.fit` was asked for, as far as it can be checked before a batch is read;
    the arguments are those of `fit`."""
    settings = engine.services.settings
    steps_per_execution, resume = as_int(steps_per_execution), as_int(resume)
    check_steps_per_execution(steps_per_execution)
    engine.sharding.check_processes()
    start_step = 0
    if state is not None:
        start_step = _get_start_step(model, state)
        model = (state.module, state.model_state)
    request = FitRequest(
        model_init=as_model_init(model),
        data=get_split(data, "train"),
        state=state,
        start_step=start_step,
        length=TrainingLength(*settings.choose_length(steps, epochs)),
        steps_per_execution=steps_per_execution or settings.steps_per_execution,
        resume=resume,
        init_from=init_from,
    )
    _check_run_dir(engine)
    check_starting_point(resume, state, init_from)
    return request


def _get_start_step(model: Any, state: TrainState) -> int:
    """Return the step of a state to continue from."""
    if model is not None:
        raise ConfigurationError("fit takes a model or a state to continue from, not both")
    if not isinstance(state, TrainState):
        raise StateError(
            f"state must be a TrainState, such as result.state, not {type(state).__name__}"
        )
    check_not_consumed(state)
    return int(state.step)


def _check_run_dir(engine: EngineView) -> None:
    if engine.run_dir is None or engine.fast_dev_run is not None:
        return
    if not engine.plugins.hooks.fit_context.plugins:
        raise ConfigurationError(
            f"run_dir is {engine.run_dir!r}, and no plugin writes there: install "
            "fulgurite-checkpoint or fulgurite-logging and add a Checkpointer or a file logger "
            "to the plugins, or leave run_dir out"
        )
