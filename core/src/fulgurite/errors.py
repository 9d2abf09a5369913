"""Every exception that Fulgurite raises on purpose, and the checks of arguments that raise them.

A message says what was wrong, where it came from, and what to do. Catch `FulguriteError` for every
exception of ours, or one of its subclasses for one kind.
"""

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import product
from numbers import Integral
from traceback import walk_tb
from typing import Any

from fulgurite._src.printable import as_printable
from fulgurite._src.record_names import find_fault

_MAX_SUGGESTIONS = 3
_WORD = re.compile("[^\\W_]{3,}")
_STEM = 6


class FulguriteError(Exception):
    """The base of every exception raised on purpose."""

    def __str__(self) -> str:
        # A message may quote a file, and ends in a terminal.
        return as_printable(super().__str__())


class ConfigurationError(FulguriteError, ValueError):
    """An invalid argument: a bad value, a wrong type, or two that exclude each other."""


class PathError(FulguriteError, LookupError):
    """A path or pattern that cannot be parsed, or that matches nothing."""


class PluginError(FulguriteError):
    """A plugin that cannot be found, imported, registered or ordered, or two that clash."""


class ModelError(FulguriteError):
    """A module that breaks the training contract: no loss, one array at two paths, a changed
    structure."""


class StateError(FulguriteError):
    """A train state that was consumed, or that does not fit the engine it is passed to."""


class DataError(FulguriteError):
    """A data source that is empty, ended early, or changed the structure of its batches."""


class CompilationError(FulguriteError):
    """More batch shapes than `max_compilations` allows."""


class CheckpointError(FulguriteError):
    """A run directory or checkpoint that is missing, damaged, locked, or does not fit."""


class SaveError(CheckpointError):
    """What was trained could not be saved, or something failed after the last step.

    Attributes:
        result: what `fit` would have returned.

    Args:
        message: what failed.
        result: becomes an attribute.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class EvaluationInterrupted(FulguriteError):
    """Raised between two batches of an evaluation, or at the end of a fit within an action of
    another, because training is to stop.

    Let it through: the action that ran the evaluation or fit is done again when the run resumes.
    """


class ProcessError(FulguriteError):
    """Another process that never arrived, did not answer in time, or failed at something it does
    for all."""


class CallbackError(FulguriteError, RuntimeError):
    """A check such as `eqx.error_if` that failed while a compiled step ran, or a callback of it,
    such as that of `jax.debug.callback`, that raised an error."""


class NonFiniteError(FulguriteError, FloatingPointError):
    """A loss term, gradient or update that is NaN or infinite.

    Attributes:
        step: the first step whose update was not finite.
        term: what was not finite, such as ``loss`` or ``gradient of layers[0].weight``.

    Args:
        step: becomes an attribute.
        term: likewise.
        skipped: how many steps in a row were skipped, where that is the error.
    """

    def __init__(self, step: int, term: str, skipped: int = 0) -> None:
        text = (
            f"step {step}: {term} is not finite. Nothing of this step is saved. Look at the "
            "batch and learning rate of that step, or choose Engine(on_nonfinite='skip') to leave "
            "such updates out."
        )
        if skipped:
            text = (
                f"step {step}: each of the last {skipped} steps was skipped, because {term} was "
                "not finite, so nothing is trained any more. Look at data, learning rate and "
                "weights, or choose Engine(on_nonfinite='raise') to see which term it is."
            )
        super().__init__(text)
        self.step = step
        self.term = term


def mark_as_shared(error: Exception) -> None:
    """Note on an exception that every process raises it, or a `ProcessError` for it, here."""
    error.is_shared_by_processes = True  # type: ignore[attr-defined]


def is_shared(error: BaseException | None) -> bool:
    """Return whether every process knows of an exception, or of its cause."""
    while error is not None:
        if getattr(error, "is_shared_by_processes", False):
            return True
        error = error.__cause__ or error.__context__
    return False


class error_context:
    """Add a note to an exception that leaves the block.

    A class, because a generator takes ten times as long, and a pipeline enters one for each
    example.

    Example:
        from fulgurite.errors import error_context

        with error_context(lambda: "in the second file"):
            rows = [float(number) for number in ("1", "2")]

    Args:
        note: returns the note; called only for an exception.
    """

    __slots__ = ("note",)

    def __init__(self, note: Callable[[], str]) -> None:
        self.note = note

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Add the note, and let the exception pass."""
        if error is not None:
            error.add_note(self.note())


@contextmanager
def exit_as_error(error_class: type[FulguriteError], who: str) -> Iterator[None]:
    """Raise an error for a `SystemExit` that leaves the block: the program would end without a
    word, perhaps as if it had succeeded, and without having saved what was trained.

    The exit of a signal handler of the program passes.

    Args:
        error_class: of the error.
        who: what is called in the block.
    """
    try:
        yield
    except SystemExit as error:
        if _is_raised_by_signal_handler(error):
            raise
        code = "" if error.code is None else repr(error.code)
        raise error_class(
            f"{who} called sys.exit({code}), which would end the program in the middle of "
            "a run: raise an exception that says what is wrong, or have an action return "
            "fg.StopTraining(reason)"
        ) from error


def _is_raised_by_signal_handler(error: BaseException) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers if callable(handler)]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence for the end of a message: the closest known name, or else those that share
    a word with it if they are few, or else all of them."""
    names = sorted(known)
    similar = find_similar_names(name, names)
    if similar:
        return f"Did you mean {' or '.join(map(repr, similar))}?"
    return f"There are: {', '.join(names)}." if names else "There are none."


def find_similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the closest known name, or else those that share a word with it if they are few.

    Args:
        name: which is not known.
        known: the names that are.
    """
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return close
    related = [other for other in names if _share_word(name, other)]
    return related if len(related) <= _MAX_SUGGESTIONS else []


def _share_word(name: str, other: str) -> bool:
    """Return whether two names have a word in common, perhaps in two forms, such as `accumulate`
    and `accumulation`."""
    pairs = product(_WORD.findall(name), _WORD.findall(other))
    return any(first[:_STEM] == second[:_STEM] for first, second in pairs)


def as_int(value: Any) -> Any:
    """Return an integer of any library, such as NumPy's, as Python's: it has no limit, and JSON can
    hold it. Anything else, a bool included, is returned as it is."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_integer else value


def set_ints(owner: Any, *names: str) -> None:
    """Replace the integers of other libraries in fields of a dataclass, which may be frozen.

    Args:
        owner: the object.
        names: of the fields.
    """
    for name in names:
        object.__setattr__(owner, name, as_int(getattr(owner, name)))


def check_positive_int(
    value: Any, label: str, *, error: type[FulguriteError] = ConfigurationError
) -> None:
    """Raise an error unless `value` is an integer above 0. A bool is not an integer here.

    Args:
        value: the argument.
        label: how the message calls it, such as ``"ArrayData: batch_size"``.
        error: the class of the exception.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise error(f"{label} is {value!r}; it must be a positive integer")


def check_one_of(
    value: Any,
    choices: Iterable[Any],
    label: str,
    *,
    error: type[FulguriteError] = ConfigurationError,
) -> None:
    """Raise an error unless `value` equals one of `choices`.

    Args:
        value: the argument.
        choices: the values that are allowed, in the order in which the message lists them.
        label: how the message calls it, such as ``"ArrayData: remainder"``.
        error: the class of the exception.
    """
    options = list(choices)
    # A list instead of a set, because the argument of a user may be unhashable.
    if value in options:
        return
    *others, last = map(repr, options)
    listed = f"{', '.join(others)} or {last}" if others else last
    raise error(f"{label} is {value!r}; choose {listed}")


def check_name(value: Any, label: str, *, error: type[FulguriteError] = ConfigurationError) -> None:
    """Raise an error unless `value` is a non-empty string that records may be called by.

    Args:
        value: the argument.
        label: how the message calls it, such as ``"Evaluator: name"``.
        error: the class of the exception.
    """
    if not isinstance(value, str) or not value:
        raise error(f"{label} is {value!r}; it must be a non-empty string")
    fault = find_fault(value)
    if fault is not None:
        raise error(f"{label} is {value!r:.200}, which cannot be written: {fault}")


def check_callable(
    value: Any, label: str, *, error: type[FulguriteError] = ConfigurationError
) -> None:
    """Raise an error unless `value` can be called.

    Args:
        value: the argument.
        label: how the message calls it, such as ``"Evaluator 'test': fn"``.
        error: the class of the exception.
    """
    if not callable(value):
        raise error(f"{label} is {value!r}; it must be a function")


def check_tuple_of(
    value: Any,
    item_type: type,
    label: str,
    *,
    error: type[FulguriteError] = ConfigurationError,
) -> None:
    """Raise an error unless `value` is a tuple whose items are all of `item_type`.

    A string instead of a tuple of names is the usual mistake: its letters would become the names.

    Args:
        value: the argument.
        item_type: the type of each item.
        label: how the message calls it, such as ``"MyPlugin.after"``.
        error: the class of the exception.
    """
    if not isinstance(value, tuple) or not all(isinstance(item, item_type) for item in value):
        items = "names" if item_type is str else f"{item_type.__name__}s"
        raise error(f"{label} must be a tuple of {items}, not {value!r}")
