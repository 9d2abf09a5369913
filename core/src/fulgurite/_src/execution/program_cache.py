"""The programs of an engine, each built once for a kind of model and of batches."""

from typing import Any

import equinox as eqx

from fulgurite._src.execution.debugging import read_trace_settings
from fulgurite._src.execution.program import Program
from fulgurite._src.recent import RecentCache
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import ModelInit, TrainState
from fulgurite._src.tree.specs import tree_signature


class ProgramCache:
    """Builds training programs at their first use, and keeps those that were used last.

    Args:
        services: what the engine provides.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._programs = RecentCache[Program]()

    def get(self, model_init: ModelInit, batches: tuple[Any, ...], device_arrays: Any) -> Program:
        """Return the program for a kind of model and of batches, by JAX's settings of now.

        Args:
            model_init: where the module comes from.
            batches: a batch of each structure to train on.
            device_arrays: what indexed batches are gathered from, or None.
        """
        model = model_init.model
        if model is None:
            key = make_root_key(self._services.settings.seed)
            model = eqx.filter_eval_shape(model_init.build, model_init.arrays, key)
        settings = read_trace_settings()
        program = self._programs.get_or_build(
            (settings, tree_signature((model, batches, device_arrays))),
            lambda: Program(self._services, model_init, batches, device_arrays),
        )
        # A module that makes functions gives other ones at each call; those in a state are those of
        # the program's own spec.
        spec = program.state_spec
        signature = tree_signature(((spec.module, spec.model_state), batches, device_arrays))
        return self._programs.get_or_build((settings, signature), lambda: program)

    def find(self, state: TrainState) -> Program | None:
        """Return a program for states of this structure that was built already, or None."""
        programs = self._programs.list_distinct()
        return next((program for program in programs if program.layout.matches(state)), None)

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
