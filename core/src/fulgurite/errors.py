"""Every exception that Fulgurite raises on purpose.

A message says what was wrong, where it came from, and what to do. Catch `FulguriteError` for every
exception of ours, or one of its subclasses for one kind.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class FulguriteError(Exception):
    """The base of every exception raised on purpose."""


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
    """A train state that was consumed, or that does not fit the engine it is given to."""


class DataError(FulguriteError):
    """A data source that is empty, ended early, or changed the structure of its batches."""


class CompilationError(FulguriteError):
    """More batch shapes than `max_compilations` allows."""


class CheckpointError(FulguriteError):
    """A run directory or checkpoint that is missing, damaged, locked, or does not fit."""


class ProcessError(FulguriteError):
    """Another process that never arrived, did not answer in time, or failed at something it does
    for all."""


class NonFiniteError(FulguriteError, FloatingPointError):
    """A loss term, gradient or update that is NaN or infinite.

    Attributes:
        step: the first step whose update was not finite.
        culprit: what was not finite, such as ``loss`` or ``gradient of layers[0].weight``.
    """

    def __init__(self, step: int, culprit: str) -> None:
        fix = "Look at the batch and learning rate of that step, or choose Engine(on_nonfinite='skip')"
        told = f"step {step}: {culprit} is not finite. Nothing of this step is saved"
        super().__init__(f"{told}. {fix} to leave such updates out.")
        self.step, self.culprit = step, culprit


@contextmanager
def error_context(note: Callable[[], str]) -> Iterator[None]:
    """Adds a note to an exception that leaves the block; it is written only then."""
    try:
        yield
    except BaseException as error:
        error.add_note(note())
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for the end of a message: the closest known name, or else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"There are: {', '.join(names)}." if names else "There are none."
