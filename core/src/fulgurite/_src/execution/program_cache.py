"""The programs of an engine, each built once for a kind of model and of batches."""

from typing import Any

import equinox as eqx

from fulgurite._src.execution.program import Program
from fulgurite._src.recent import RecentCache
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import (
    ModelInit,
    TrainState,
    as_model_init,
    check_not_consumed,
)
from fulgurite._src.tree.specs import tree_signature
from fulgurite.errors import NonFiniteError


class ProgramCache:
    """Builds training programs at their first use, and keeps those that were used last.

    Args:
        services: what the engine provides.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._programs = RecentCache[Program]()
        self._step_program: Program | None = None

    def get(self, model_init: ModelInit, batches: tuple[Any, ...], device_arrays: Any) -> Program:
        """Return the program for a kind of model and of batches.

        Args:
            model_init: where the module comes from.
            batches: a batch of each structure to train on.
            device_arrays: what indexed batches are gathered from, or None.
        """
        model = model_init.model
        if model is None:
            key = make_root_key(self._services.settings.seed)
            model = eqx.filter_eval_shape(model_init.build, model_init.arrays, key)
        program = self._programs.get_or_build(
            tree_signature((model, batches, device_arrays)),
            lambda: Program(self._services, model_init, batches, device_arrays),
        )
        # A module that makes functions gives other ones at each call; those in a state are those of
        # the program's own spec.
        spec = program.state_spec
        signature = tree_signature(((spec.module, spec.model_state), batches, device_arrays))
        return self._programs.get_or_build(signature, lambda: program)

    def get_for_step(self, state: TrainState, batch: Any) -> Program:
        """Return the program for a step by hand: the one of the step before, if it fits.

        Args:
            state: the state to train from.
            batch: the batch to train on.
        """
        program = self._step_program
        if program is None or not program.layout.matches(state):
            check_not_consumed(state)
            model_init = as_model_init((state.module, state.model_state))
            program = self.get(model_init, (batch,), None)
            self._step_program = program
            program.check(state)
        return program

    def use_for_steps(self, program: Program) -> None:
        """Take a program for the next steps by hand, which knows of batches that a single one does
        not show."""
        self._step_program = program

    def check_finite(self, state: TrainState) -> None:
        """Raise `NonFiniteError` if a step by hand up to this state was not finite."""
        if self._step_program is not None:
            self._step_program.check_finite(state.nonfinite)
        elif self._services.settings.on_nonfinite == "raise" and state.nonfinite.step >= 0:
            raise NonFiniteError(int(state.nonfinite.step), "an update that another engine made")

    def explain(self) -> str:
        """Return how many steps go into one dispatch of each program, and why."""
        lines = []
        for program in self._programs.list_distinct():
            choice = program.dispatch_choice
            if choice is not None:
                lines.append(f"steps_per_execution: {choice.steps}, because {choice.reason}")
        if lines:
            return "\n".join(lines)
        steps = self._services.settings.steps_per_execution
        if steps != "auto":
            return f"steps_per_execution: {steps}, as it was given"
        return "steps_per_execution: auto; fit chooses when it knows the model and the data"
