"""Tracebacks of errors that leave the engine, without the frames of the engine, JAX and Orbax.

An error in a user's `training_step` used to end with one sentence below 50 to 60 lines of frames
that the user cannot change. `FULGURITE_TRACEBACK=full` shows all of them, as
`JAX_TRACEBACK_FILTERING=off` does for those that JAX itself leaves out.
"""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from fulgurite.errors import FulguriteError

TRACEBACK_VARIABLE = "FULGURITE_TRACEBACK"
"""The environment variable that shows whole tracebacks where it is `full`."""
HIDDEN_FRAMES_NOTE = (
    f"Frames of Fulgurite and JAX are left out; {TRACEBACK_VARIABLE}=full shows them."
)
"""The note on an error whose traceback was made short."""
_JAX_NOTE = "For simplicity, JAX has removed its internal frames"
_LIBRARIES = {"equinox", "jax", "jaxlib", "jaxtyping", "optax", "orbax", "pluggy"}
_MARK = "__tracebackhide__"
"""Packages that set it to True in their `__init__` are Fulgurite's. Who writes a `fulgurite_...` of
their own wants to see its frames, so that the name alone does not say it."""

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def hide_internal_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Make the tracebacks of errors that leave a function short: the frames of Fulgurite, its
    plugins, JAX, Equinox and Orbax are taken out, those of the user stay.

    The last frame stays where a raw exception was raised in Fulgurite itself: that is our mistake,
    and its place is what we need to know.

    Args:
        function: that the user calls.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE) != "full":
                is_wrong_call = isinstance(error, TypeError) and not _accepts(
                    function, args, kwargs
                )
                _shorten(error, is_wrong_call)
            raise

    return call


def hide_constructor_frames(cls: C) -> C:
    """Make the tracebacks of errors that leave the constructor of a class short.

    Above `@dataclass`, because that makes the constructor.

    Args:
        cls: a class that the user calls.
    """
    cls.__init__ = hide_internal_frames(cls.__init__)
    return cls


def has_user_frames(error: BaseException) -> bool:
    """Return whether an exception that was caught by Fulgurite passed through code of the user,
    whose place is worth knowing."""
    packages = _list_packages(list(_iter_frames(error.__traceback__)))
    return not all(map(_is_hidden, packages))


def find_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user that an exception passed through; None without
    one."""
    frames = list(_iter_frames(error.__traceback__))
    user_frames = [
        frame
        for frame, package in zip(frames, _list_packages(frames), strict=True)
        if not _is_hidden(package)
    ]
    return traceback.extract_tb(_link_frames(user_frames[-1:]))[0] if user_frames else None


def _accepts(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a function takes these arguments, whatever their values."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _shorten(error: Exception, is_wrong_call: bool) -> None:
    """Take the frames out of an exception and of those that Python prints with it.

    Args:
        error: what leaves the function that the user called.
        is_wrong_call: whether the function does not take the arguments, which is a mistake in the
            line of the user.
    """
    is_shorter = False
    for linked in _iter_chain(error):
        frames = list(_iter_frames(linked.__traceback__))
        packages = _list_packages(frames)
        kept_frames = [
            frame
            for frame, package in zip(frames, packages, strict=True)
            if not _is_hidden(package)
        ]
        # Fulgurite itself never raises another error on purpose.
        is_ours = bool(packages) and _is_marked(packages[-1])
        if is_ours and not isinstance(linked, FulguriteError) and not is_wrong_call:
            kept_frames.append(frames[-1])
        is_shorter = is_shorter or len(kept_frames) < len(frames)
        linked.__traceback__ = _link_frames(kept_frames)
        if hasattr(linked, "__notes__"):
            notes = [note for note in linked.__notes__ if _JAX_NOTE not in note]
            linked.__notes__[:] = notes
    if (
        is_shorter
        and not is_wrong_call
        and HIDDEN_FRAMES_NOTE not in getattr(error, "__notes__", ())
    ):
        error.add_note(HIDDEN_FRAMES_NOTE)


def _iter_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that Python prints with it."""
    printed: set[int] = set()
    while error is not None and id(error) not in printed:
        printed.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _iter_frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _link_frames(frames: list[TracebackType]) -> TracebackType | None:
    """Return the frames as one traceback."""
    linked = None
    for frame in reversed(frames):
        linked = TracebackType(linked, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return linked


def _is_hidden(package: str) -> bool:
    """Return whether the frames of a package are left out."""
    return package in _LIBRARIES or _is_marked(package)


def _is_marked(package: str) -> bool:
    """Return whether a package is one of Fulgurite's."""
    return getattr(sys.modules.get(package), _MARK, False) is True


def _list_packages(frames: list[TracebackType]) -> list[str]:
    """Return the top-level package to which each frame belongs: that of its code, and for code of
    the standard library that of who called it."""
    packages: list[str] = []
    for frame in frames:
        package = str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in sys.stdlib_module_names and packages:
            package = packages[-1]
        packages.append(package)
    return packages
