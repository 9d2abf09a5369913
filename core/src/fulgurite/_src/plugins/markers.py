"""How hooks are specified and implemented: the two decorators, and what a specification says."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

import optax
import pluggy

from fulgurite.errors import PluginError, check_one_of

PROJECT = "fulgurite"

HookKind = Literal["build", "traced", "event", "logger", "persistence"]
"""*build* hooks answer before anything is compiled. *traced* hooks run while the step is traced,
perhaps several times, and are part of it. *event* and *logger* hooks run on the host between steps.
*persistence* hooks save and restore."""

F = TypeVar("F", bound=Callable[..., Any])


class Combine(Enum):
    """How the answers of several plugins to one hook become one; the value is the text of the
    reference.

    Example:
        from fulgurite.plugins import Combine, find_hookspecs, hookspecs

        hooks = find_hookspecs(hookspecs)
        hooks["loss_terms"].combine is Combine.MERGE  # True
    """

    ALL = "All of them, in order."
    EACH = "Each plugin for itself."
    EXCLUSIVE = "One answer: two are an error that names both plugins."
    BY_NAME = (
        "All of them, by name; a name twice is an error that names both plugins, unless both give "
        "the same object."
    )
    MERGE = "Merged by name; a name twice is an error that names both plugins."
    FOLD = "Folded: each gets what the one before it returned."
    CHAIN = "Chained in order."
    WRAP = "Nested: each calls the next one, its argument `call`; the first is outermost."


_RETURNS = {
    Combine.BY_NAME: list,
    Combine.MERGE: dict,
    Combine.CHAIN: optax.GradientTransformation,
}
"""The class of an answer that can be combined so."""


@dataclass(frozen=True)
class HookMetadata:
    """What a specification says of its hook.

    Attributes:
        kind: when it runs.
        combine: how several answers become one.
        returns: the class of an answer, or `list[X]`; None is always a valid answer. None for a
            hook whose answers are not checked.
        when: when it is called, as a sentence for the reference.
    """

    kind: HookKind
    combine: Combine
    returns: Any
    when: str


hookimpl = pluggy.HookimplMarker(PROJECT)
"""Mark a plugin's method as the implementation of the hook of the same name."""


def hookspec(
    kind: HookKind,
    combine: Combine = Combine.ALL,
    returns: Any = None,
    when: str = "",
) -> Callable[[F], F]:
    """Mark a function as the specification of a hook.

    Args:
        kind: when it runs.
        combine: how the answers of several plugins become one.
        returns: the class of an answer, or `list[X]`; an answer may always be None. By default what
            `combine` needs: a list for `BY_NAME`, a dictionary for `MERGE`, an
            `optax.GradientTransformation` for `CHAIN`, and anything for the others.
        when: when it is called, as a sentence.

    Example:
        class Specifications:
            @fg.hookspec("event", when="After each phase of a curriculum.")
            def on_phase_end(run, phase):
                \"\"\"A phase has ended.\"\"\"
    """

    if callable(kind):
        raise PluginError('fg.hookspec takes the kind of the hook: write @fg.hookspec("event")')
    check_one_of(kind, get_args(HookKind), "hookspec: kind", error=PluginError)
    if not isinstance(combine, Combine):
        members = ", ".join(map(str, Combine))
        raise PluginError(f"hookspec: combine is {combine!r}; choose one of {members}")
    if returns is None:
        returns = _RETURNS.get(combine)
    _check_returns(returns, combine)

    def mark(function: F) -> F:
        function.fulgurite_hook = HookMetadata(kind, combine, returns, when)  # type: ignore[attr-defined]
        return pluggy.HookspecMarker(PROJECT)(function)

    return mark


def _check_returns(returns: Any, combine: Combine) -> None:
    """Raise a PluginError unless `returns` is a class, or `list[X]`, of answers that can be
    combined."""
    if returns is None:
        return
    container = get_origin(returns) or returns
    item_classes = get_args(returns) if container is list else ()
    for answer_class in (container, *item_classes):
        if not isinstance(answer_class, type) or answer_class in (Any, UnionType):
            raise PluginError(f"hookspec: returns is {returns!r}; it must be a class, or list[X]")
    needed = _RETURNS.get(combine, object)
    if not issubclass(container, needed):
        raise PluginError(
            f"hookspec: returns is {returns!r}; Combine.{combine.name} combines answers of the "
            f"class {needed.__name__}"
        )


def find_hookspecs(namespace: Any) -> dict[str, HookMetadata]:
    """Return the hooks that a module or class specifies or inherits, by name."""
    hooks = {}
    for name in dir(namespace):
        metadata = getattr(getattr(namespace, name, None), "fulgurite_hook", None)
        if metadata is not None:
            hooks[name] = metadata
    return hooks
