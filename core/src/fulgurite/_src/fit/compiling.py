"""How many steps go into a dispatch of a fit, and their compilation, which begins while the state
is made."""

import math
from contextlib import suppress
from typing import Any

import numpy as np

from fulgurite._src.execution.program import Program
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.scheduler import find_interval
from fulgurite._src.sharding import SINGLE_PROCESS
from fulgurite._src.training.settings import StepsPerExecution
from fulgurite._src.triggers import StepRange


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
    program: Program,
    steps_per_execution: int,
    step: int,
    step_range: StepRange,
    batch: Any,
    device_arrays: Any,
) -> None:
    """Begin to compile the first step of a fit, which takes as long as the rest of its start.

    XLA works on a thread. The loop waits for it where it would compile, and what fails is raised
    there: after the loggers are open, and where plugins are told.

    Args:
        engine: the engine that trains.
        program: the training program.
        steps_per_execution: the largest number of steps in one dispatch.
        step: at which this process begins.
        step_range: of the fit.
        batch: a batch, which is likely of the shapes of the first one.
        device_arrays: the arrays on the device that indexed batches are gathered from.
    """
    if step == step_range.stop or engine.sharding.sync is not SINGLE_PROCESS:
        # Several processes agree on each batch of new shapes before they compile for it.
        return
    update_rule = program.update_rule.for_step(step, step_range)
    compiled_step = program.get_compiled_step(steps_per_execution, update_rule)
    nothing_due = np.zeros(len(engine.services.due_names), bool)
    with suppress(Exception):
        compiled_step.compile_ahead(batch, nothing_due, step, device_arrays)
