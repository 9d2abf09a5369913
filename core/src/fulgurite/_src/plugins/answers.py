"""What implementations of hooks return: checked where they return it, so that the error names the
plugin."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_args, get_origin

import jax
from jax.core import Tracer

from fulgurite._src.tree.specs import format_tree
from fulgurite.errors import PluginError

_NOT_BEGUN = {
    "generator": inspect.isgenerator,
    "coroutine": inspect.iscoroutine,
    "asynchronous generator": inspect.isasyncgen,
}
_recorded: ContextVar[list[tuple[str, Any]] | None] = ContextVar("recorded", default=None)


def check_answer(hook: str, returns: Any, answer: Any, *, may_return_tracers: bool) -> None:
    """Raise `PluginError` if an answer is not one that its hook may have.

    Args:
        hook: the name of the hook.
        returns: the class that an answer must have, or `list[X]`; None for any.
        answer: what the implementation returned; None is always valid.
        may_return_tracers: whether the hook may run while a program is traced.
    """
    if answer is None:
        return
    check_has_run(f"hook {hook}", answer)
    if returns is not None:
        _check_type(hook, returns, answer)
    leaves = [] if may_return_tracers else _list_leaves(hook, answer)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise PluginError(
            f"hook {hook} returned {format_tree(answer)} of a step that was traced: it has no "
            "value. Keep arrays of steps in the plugin state, which run.state has"
        )


def _list_leaves(hook: str, answer: Any) -> list[Any]:
    try:
        return jax.tree.leaves(answer)
    except ValueError as error:
        if "sorting pytree dictionary keys" not in str(error):
            raise
        raise PluginError(
            f"hook {hook} returned {answer!r:.200}, which has a dictionary with keys of several "
            "types, such as 'a' and 3: make them strings"
        ) from error


def check_has_run(what: str, answer: Any) -> None:
    """Raise `PluginError` for what a function returns whose code has not run.

    Args:
        what: was called, for the error.
        answer: what it returned.
    """
    for kind, is_kind in _NOT_BEGUN.items():
        if is_kind(answer):
            if kind == "coroutine":
                answer.close()  # or Python tells at some later time that nobody awaited it
            raise PluginError(
                f"{what} returned a {kind}, whose code has not run: use a plain function, without "
                "yield and async, that returns a value"
            )


def _check_type(hook: str, returns: Any, answer: Any) -> None:
    container = get_origin(returns) or returns
    if not isinstance(answer, container):
        name = container.__name__
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        raise PluginError(f"hook {hook} returns {article} {name} or None, not {answer!r}")
    if container is not list:
        return
    for item_class in get_args(returns):
        for item in answer:
            if not isinstance(item, item_class):
                raise PluginError(
                    f"hook {hook}: return a list of {item_class.__name__}, not {item!r}"
                )


@contextmanager
def record_answers() -> Iterator[list[tuple[str, Any]]]:
    """Collect what implementations of hooks return in the block, each with a string that names
    plugin and hook."""
    answers: list[tuple[str, Any]] = []
    token = _recorded.set(answers)
    try:
        yield answers
    finally:
        _recorded.reset(token)


def note_answer(who: str, answer: Any) -> None:
    """Note an answer for `record_answers`.

    Args:
        who: plugin and hook.
        answer: what it returned.
    """
    answers = _recorded.get()
    if answers is not None:
        answers.append((who, answer))


def check_not_among(tracers: list[Tracer], answers: list[tuple[str, Any]]) -> None:
    """Raise `PluginError` if a hook has returned one of the arrays that belong to another trace.

    Args:
        tracers: those arrays.
        answers: of `record_answers`.
    """
    for who, answer in answers:
        for leaf in jax.tree.leaves(answer):
            if any(leaf is tracer for tracer in tracers):
                raise PluginError(
                    f"{who} returned an array of another trace, {format_tree(leaf)}: it has no "
                    "value outside of the function that computed it. Compute it in this hook, or "
                    "keep it in the plugin state instead of in `self`"
                )
