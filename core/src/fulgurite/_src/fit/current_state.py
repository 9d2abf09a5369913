"""The train state of a running fit, in the form that is needed."""

from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.execution.flat_state import FlatState, Vectors
from fulgurite._src.execution.program import Program
from fulgurite._src.timing import Timings
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.specs import check_same_structure


class CurrentState:
    """The train state after the newest step: flat for the compiled step, unflattened for those who
    read it, which is kept until the state changes.

    Args:
        program: the training program.
        state: that with which the fit begins; consumed.
        timings: where waiting for the device counts.
    """

    def __init__(self, program: Program, state: TrainState, timings: Timings) -> None:
        self._program = program
        self._timings = timings
        self._flat = program.layout.flatten_on_host(state)
        self._unflattened: TrainState | None = None

    @property
    def flat(self) -> FlatState:
        """The state as it crosses `jax.jit`."""
        return self._flat

    @flat.setter
    def flat(self, flat: FlatState) -> None:
        self._flat = flat
        self._unflattened = None

    def read(self) -> TrainState:
        """Return the state; waits for the device.

        Raises:
            NonFiniteError: it is not finite.
        """
        if self._unflattened is None:
            # Otherwise the plugin that asks for the state would be charged for the training.
            with self._timings.time("wait"):
                nonfinite = self._program.read_nonfinite(self._flat)
            self._program.check_finite(nonfinite)
            self._unflattened = self._program.layout.unflatten_on_host(self._flat)
        return self._unflattened

    def peek(self) -> TrainState:
        """Return the state without waiting for the device; nobody has looked whether it is
        finite."""
        if self._unflattened is not None:
            return self._unflattened
        return self._program.layout.unflatten(self._flat)

    def replace(self, new_state: TrainState, where: str) -> None:
        """Continue with another state of the same structure; what was counted and measured stays.

        Args:
            new_state: its Python numbers become arrays.
            where: who gave it, for errors.
        """
        state = self.peek()
        new_state = _cast_numbers(new_state, state)
        check_same_structure(state, new_state, where)
        # They are the run's, also when it goes back to earlier weights. A new state of the same
        # step brings its own, for its step was made once more; but no window logged since then.
        window, nonfinite = state.metric_window, state.nonfinite
        if int(new_state.step) == int(state.step):
            nonfinite = new_state.nonfinite
            if bool(window.closed) == bool(new_state.metric_window.closed):
                window = new_state.metric_window
        new_state = new_state.replace(step=state.step, metric_window=window, nonfinite=nonfinite)
        self.flat = self._program.layout.flatten_on_host(new_state)

    def reset_metrics(self) -> None:
        """Reset the training metrics at this step."""
        self.flat = self._program.layout.flatten_on_host(self.read().reset_metrics())

    def close_window(self) -> Vectors:
        """Close the metric window at this step, and return what `Program.read_window` takes."""
        self.flat, values = self._program.close_window(self._flat)
        return values


def _cast_numbers(new_state: TrainState, state: TrainState) -> TrainState:
    """Return a state in which Python numbers, such as a new learning rate, are arrays like those
    that they replace."""
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        return new_state

    def cast(new: Any, old: Any) -> Any:
        is_number = isinstance(new, int | float) and isinstance(old, jax.Array)
        return jnp.asarray(new, old.dtype) if is_number else new

    return jax.tree.map(cast, new_state, state)
