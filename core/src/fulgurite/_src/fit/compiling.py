"""How many steps go into a dispatch of a fit, and their compilation behind other work."""

import math
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fulgurite._src.execution.compiled_step import CompiledStep
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.running import RunningFit
from fulgurite._src.fit.scheduler import find_interval
from fulgurite._src.sharding import SINGLE_PROCESS
from fulgurite._src.training.settings import StepsPerExecution
from fulgurite._src.triggers import StepRange


class StepPlan(NamedTuple):
    """The steps that a fit is to take.

    Attributes:
        step: at which this process begins.
        step_range: of the fit.
        steps_per_execution: the largest number of steps in one dispatch.
    """

    step: int
    step_range: StepRange
    steps_per_execution: int


def choose_steps_per_execution(
    engine: EngineView,
    program: Program,
    requested: StepsPerExecution,
    step: int,
    step_range: StepRange,
    epoch_length: int | None,
) -> int:
    """Return the largest number of steps in one dispatch.

    Args:
        engine: the engine that trains.
        program: the training program.
        requested: what the user wants.
        step: at which this process begins.
        step_range: of the fit.
        epoch_length: the number of batches in an epoch, as far as it is known.
    """
    if requested != "auto":
        return requested
    interval = find_interval(engine.actions, step, step_range.start)
    return program.choose_steps_per_execution(interval, epoch_length or math.inf).steps


def compile_first_step(
    engine: EngineView,
    queue: CompilationQueue,
    program: Program,
    step_plan: StepPlan,
    batch: Any,
    device_arrays: Any,
) -> None:
    """Begin to compile the first step of a fit, which takes as long as the rest of its start.

    XLA works on a thread. The loop waits for it where it would compile, and what fails is raised
    there: after the loggers are open, and where plugins are told.

    Args:
        engine: the engine that trains.
        queue: of the fit's compilations.
        program: the training program.
        step_plan: the steps that the fit is to take.
        batch: a batch, which is likely of the shapes of the first one.
        device_arrays: the arrays on the device that indexed batches are gathered from.
    """
    step, step_range, steps_per_execution = step_plan
    if step == step_range.stop or not may_compile_ahead(engine):
        return
    update_rule = program.update_rule.for_step(step, step_range)
    compiled_step = program.get_compiled_step(steps_per_execution, update_rule)
    nothing_due = np.zeros(len(engine.services.due_names), bool)
    # Nothing is lost: what fails here is not kept, so it is traced and raised where it is needed.
    with suppress(Exception):
        compiled_step.compile_ahead(queue, None, batch, nothing_due, step, device_arrays)


def compile_for_other_shapes(
    fit: RunningFit, compiled_step: CompiledStep, step: int, device_arrays: Any
) -> None:
    """Begin to compile for the next batch of other shapes that a fit will come to, as far as that
    is known, such as the smaller last one of an epoch.

    Args:
        fit: the running fit, of whose batches those of the first dispatch are not consumed yet.
        compiled_step: of the first dispatch.
        step: the number of updates before it.
        device_arrays: the arrays on the device that indexed batches are gathered from.
    """
    stop = fit.progress.step_range.stop
    if stop is None or not may_compile_ahead(fit.engine):
        return
    nothing_due = fit.scheduler.nothing_due
    known_batches = sorted(fit.data_iterator.iter_known_batches(), key=itemgetter(0))
    for number, batch in known_batches:
        if step + number >= stop:
            break
        # As above; a batch that never comes must not end the fit.
        with suppress(Exception):
            if compiled_step.compile_ahead(
                fit.compilations, fit.state.flat, batch, nothing_due, step + number, device_arrays
            ):
                break


def may_compile_ahead(engine: EngineView) -> bool:
    """Return whether something may be compiled before it is needed: several processes agree on
    each batch of new shapes before they compile for it."""
    return engine.sharding.sync is SINGLE_PROCESS
