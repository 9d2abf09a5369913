"""What every loss takes besides its own arguments: one signature and one description for all."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, get_type_hints

from fulgurite.metrics import Mask, Values
from fulgurite.plugins import hide_internal_frames

Reduction = Literal["mean", "weighted_mean", "sum", "none"]
"""What a loss returns of the values x of its examples and their weights w. `mean`: Σ w·x / the
number of values that are not masked. `weighted_mean`: Σ w·x / Σ w. `sum`: Σ w·x. `none`: w·x of
each, 0 where it is masked."""


class LossOptions(TypedDict, total=False):
    """What every loss takes as keywords; `DEFAULTS` holds what is left out."""

    mask: Mask | None
    weight: Values | None
    reduction: Reduction


DEFAULTS: dict[str, Any] = {"mask": None, "weight": None, "reduction": "mean"}
_DESCRIPTION = """
    mask: bools over all axes of the losses or the leading ones; False for what must not count.
    weight: how much each counts, over all axes of the losses or the leading ones.
    reduction: what is returned; see `Reduction`."""

P = ParamSpec("P")
R = TypeVar("R")


def loss(function: Callable[P, R]) -> Callable[P, R]:
    """Complete a loss: its signature and `Args:` name `mask`, `weight` and `reduction`, and its
    errors show the line that calls it.

    Args:
        function: takes `**options: Unpack[LossOptions]`; its docstring ends with `Args:`, or with
            an `Example:` after it.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=DEFAULTS[name], annotation=hint)
        for name, hint in get_type_hints(LossOptions).items()
    ]
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    names = {parameter.name for parameter in [*parameters, *options]}

    @functools.wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> R:
        unexpected = [name for name in kwargs if name not in names]
        if unexpected:
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {unexpected[0]!r}"
            )
        return function(*args, **kwargs)

    compute.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    docstring = inspect.getdoc(function) or ""  # without any if Python leaves docstrings out
    description, header, example = docstring.partition("\n\nExample:")
    compute.__doc__ = description + _DESCRIPTION + header + example
    return hide_internal_frames(compute)
