"""What is exported: functions of a model, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Function:
    """A function of a model that is exported.

    Example:
        from fulgurite_export import Function

        features = Function("features", call=lambda module, batch: module.linear.weight[None])

    Attributes:
        name: under which the loaded model has it. `predict` is the module's `predict_step`, any
            other name is that of a method of the module, `method(batch)` or `method(batch, ctx)`.
        call: called as `call(module, batch)`, or `call(module, batch, ctx=ctx)` if it has such a
            parameter, in the place of the method.
        inputs: examples of its inputs, in the place of those that `export` gets.
        shapes: of its inputs, as `export(shapes=)`; None for those of `export`, or for none if it
            has inputs of its own.
        constraints: on the open sizes of its inputs, likewise.
    """

    name: str
    call: Callable[..., Any] | None = None
    inputs: Any = None
    shapes: Mapping[str, str] | None = None
    constraints: Sequence[str] | None = None
