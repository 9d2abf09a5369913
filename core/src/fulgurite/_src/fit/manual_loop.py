"""Training in a loop that the user writes, by the program that `fit` runs."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.sources import (
    ArrayData,
    as_data,
    get_batch_examples,
    get_device_arrays,
    get_split,
)
from fulgurite._src.execution.debugging import check_jit_enabled, read_trace_settings
from fulgurite._src.execution.program import Program
from fulgurite._src.execution.program_cache import ProgramCache
from fulgurite._src.fit.plan import open_data_iterator, peek_first_batch
from fulgurite._src.model.output import Output
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState, as_model_init, check_not_consumed
from fulgurite._src.triggers import StepRange, UnboundedRange
from fulgurite.errors import DataError, NonFiniteError, check_one_of

RETURNABLE = ("preds", "aux", "grads", "updates")
"""Fields of the output that leave a step only where `Engine.step` is asked for them."""


class ManualLoop:
    """The parts of a loop that a user writes; the methods of `Engine` describe their arguments.

    Args:
        services: what the engine provides.
        programs: of the engine.
    """

    def __init__(self, services: Services, programs: ProgramCache) -> None:
        self._services = services
        self._programs = programs
        # That of the newest step, which is mostly that of the next one.
        self._program: Program | None = None

    def init_state(self, model: Any, data: Any) -> TrainState:
        """Return a new train state, for batches like the first one of `data`."""
        data = get_split(data, "train")
        if isinstance(as_data(data).source, Iterator):
            raise DataError(
                "init_state would use up the first batch of an iterator: pass data that can be "
                "iterated again"
            )
        model_init = as_model_init(model)
        with open_data_iterator(self._services, data, 0, restore_on_close=True) as data_iterator:
            first_batch = peek_first_batch(data_iterator, 0)
            examples = get_batch_examples(data)
            program = self._programs.get(
                model_init, examples or (first_batch,), get_device_arrays(data)
            )
            if examples:
                # A batch alone does not say which other structures there are.
                self._program = program
            return program.init_state(model_init, make_root_key(self._services.settings.seed))

    def step(
        self,
        state: TrainState,
        batch: Any,
        returns: tuple[str, ...],
        step_range: StepRange | None,
    ) -> tuple[TrainState, Output]:
        """Make one update: return the state after it, and the step's output."""
        check_jit_enabled()
        for name in returns:
            check_one_of(name, RETURNABLE, "Engine.step: returns")
        batch = as_arrays(batch)
        program = self._get_program(state, batch)
        # On the device: whoever needs the number waits. It travels packed, and so is not consumed.
        steps_done: Any = state.step
        update_rule = program.update_rule.for_step(steps_done, step_range or UnboundedRange(0))
        compiled_step = program.get_compiled_step(1, update_rule, tuple(returns))
        nothing_due = np.zeros(len(self._services.due_names), bool)
        buffer = compiled_step.make_buffer()
        buffer.add(batch)
        with callback_error_context(lambda: f"training step {int(steps_done) + 1}"):
            flat = program.layout.flatten(state)
            dispatch = compiled_step.prepare(flat, buffer, nothing_due, steps_done)
            flat, results = compiled_step.run(dispatch, nothing_due)
            return program.layout.unflatten(flat), compiled_step.get_output(results)

    def check_finite(self, state: TrainState) -> None:
        """Raise `NonFiniteError` if a step up to this state was not finite."""
        # A loop may train several models, so that the newest step may have been that of another.
        program = self._programs.find(state)
        if program is not None:
            program.check_finite(state.nonfinite)
        elif self._services.settings.on_nonfinite == "raise" and state.nonfinite.step >= 0:
            raise NonFiniteError(int(state.nonfinite.step), "an update that another engine made")

    def iter_batches(
        self, data: Any, steps: int | None, epochs: int | None, start_step: int
    ) -> Iterator[Any]:
        """Yield the batches that a fit would take, in the same order."""
        settings = self._services.settings
        if (steps, epochs, settings.steps, settings.epochs) == (None,) * 4:
            epochs = 1
        steps, epochs = settings.choose_length(steps, epochs)
        data = get_split(data, "train")
        with open_data_iterator(self._services, data, start_step, epochs=epochs) as data_iterator:
            for item in islice(data_iterator, steps):
                yield ArrayData.gather(get_device_arrays(data), item.batch)

    def _get_program(self, state: TrainState, batch: Any) -> Program:
        """Return the program of the newest step if it fits a state, else that for the state and a
        batch."""
        program = self._program
        if program is not None and program.trace_settings != read_trace_settings():
            program = None
        if program is None or not program.layout.matches(state):
            check_not_consumed(state)
            model_init = as_model_init((state.module, state.model_state))
            program = self._programs.get(model_init, (batch,), None)
            self._program = program
            program.check(state)
        return program
