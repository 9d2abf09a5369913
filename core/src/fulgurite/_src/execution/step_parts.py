"""What passes between a compiled step and those who call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from fulgurite._src.execution.executables import Compilation
from fulgurite._src.execution.flat_state import Vectors


class StepResults(NamedTuple):
    """What leaves a step besides its state.

    Attributes:
        packed: loss, metrics and losses.
        media: the arrays of media.
        fields: the arrays of those fields of the output that were asked for.
        output_layout: what the arrays are; None while they are traced.
    """

    packed: Vectors
    media: list[Array]
    fields: list[Array]
    output_layout: "OutputLayout | None" = None


@dataclass(frozen=True, eq=False)
class OutputLayout:
    """What the arrays that leave a step are, known once it was traced.

    Attributes:
        unpack: returns the arrays in `StepResults.packed`.
        unpack_on_host: returns those in vectors of NumPy.
        output: the structure of loss, metrics and losses.
        media: the structure of media.
        fields: the structure of the fields that were asked for.
    """

    unpack: Callable[[Vectors], Any]
    unpack_on_host: Callable[[Vectors], Any]
    output: Any
    media: Any
    fields: Any


class Dispatch(NamedTuple):
    """Steps that only have to be started.

    Attributes:
        executable: of the step.
        arguments: all but what is due.
        output_layout: what the arrays are that leave the step.
        steps_done: the number of updates before the first of the steps.
    """

    executable: jax.stages.Compiled
    arguments: tuple[Any, ...]
    output_layout: OutputLayout
    steps_done: Any


class StepCompilation(NamedTuple):
    """The compilation of a step that is under way.

    Attributes:
        compilation: what XLA does.
        argument_specs: of the arguments that it is for, from `list_argument_specs`.
        batch_spec: the shapes of a batch.
        traced: the program.
        output_layout: what the arrays are that leave the step.
    """

    compilation: Compilation
    argument_specs: list[Any]
    batch_spec: Any
    traced: jax.stages.Traced
    output_layout: OutputLayout

    def fits(self, arguments: Any) -> bool:
        """Return whether the executable will be one for these arguments."""
        return list_argument_specs(arguments) == self.argument_specs


def list_argument_specs(arguments: Any) -> list[Any]:
    """Return what a program depends on of each array among its arguments."""
    specs = map(jax.typeof, jax.tree.leaves(arguments))
    return [(spec.shape, spec.dtype, getattr(spec, "weak_type", False)) for spec in specs]
