"""Errors of functions that a compiled program calls on the host: callbacks and `eqx.error_if`.

JAX hands on such an error as the text of its traceback, inside of another exception, 40 lines long,
and logs it as well. The log record holds the exception itself.
"""

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from fulgurite._src.tracebacks import find_user_frame
from fulgurite.errors import CallbackError, FulguriteError

RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""What JAX raises where a callback has failed: the latter by the fast path of `jax.jit`."""
_LOGGERS = tuple(map(logging.getLogger, ("jax._src.callback", "jax._src.debugging")))
_EQUINOX_ERROR = "_EquinoxRuntimeError"
_EQUINOX_ADVICE = "\n\n\n---"


class _Recorder(logging.Filter):
    """Keeps the newest exception that JAX logs, instead of its record."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        self.error = record.exc_info[1]
        return False


@contextmanager
def callback_error_context(where: Callable[[], str]) -> Iterator[None]:
    """Raise a `CallbackError` for the error of a callback in a program that runs within the block.

    Args:
        where: returns what ran, such as ``"training step 5"``; called only for an error.
    """
    recorder = _Recorder()
    for logger in _LOGGERS:
        logger.addFilter(recorder)
    try:
        yield
    except RUNTIME_ERRORS as error:
        original = recorder.error
        if original is None or str(original) not in str(error):
            raise
        translated, cause = _translate(where(), original)
        for note in getattr(error, "__notes__", ()):
            translated.add_note(note)
        raise translated from cause
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(recorder)


def _translate(where: str, error: BaseException) -> tuple[FulguriteError, BaseException | None]:
    """Return the error for the user, and its cause as far as that says more. One of Fulgurite, such
    as that of a plugin's check, says where it is itself."""
    if isinstance(error, FulguriteError):
        return error, None
    if type(error).__name__ == _EQUINOX_ERROR:
        message = str(error).partition(_EQUINOX_ADVICE)[0]
        return CallbackError(f"{where}: {message} (eqx.error_if{_find_check(error)})"), None
    frame = find_user_frame(error)
    place = "" if frame is None else f" at {frame.filename}:{frame.lineno}, in {frame.name}"
    message = f"{where}: a callback raised {type(error).__name__}{place}: {error}"
    return CallbackError(message), error


def _find_check(error: BaseException) -> str:
    """Return where `eqx.error_if` was called; nothing if Equinox does not tell.

    There is no public name for it: the function that raises holds the frames of the call as text,
    the innermost first.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    stack: list[Any] = frame.f_locals.get("stack", [])
    for text in stack:
        match = re.search(r'File "(.*)", line (\d+), in (.*)', str(text))
        if match is not None:
            return " at {}:{}, in {}".format(*match.groups())
    return ""
