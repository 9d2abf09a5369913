"""Where an operation of a traced step comes from: the line of the user, the part of the step."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fulgurite.plugins import PluginManager
from jax.extend.core import JaxprEqn

from fulgurite_replay.layers import find_layer

_LIBRARIES = ("equinox", "jax", "jaxlib", "jaxtyping", "numpy", "optax", "pluggy")
_MARK = "__tracebackhide__"
_BACKWARD = "transpose("
"""What the name stack of an operation of the backward pass holds."""
_REPEATED = "rematted_computation"
"""What that of an operation holds which `jax.checkpoint` executes again for the backward pass."""
_DIFFERENTIATED = "jvp("
"""What that of an operation holds of which a gradient is computed."""
# Functions of the core: the step, those that call the optimizer, the one that calls a module.
_OPTIMIZER_FUNCTIONS = ("apply_gradients", "call_optimizer", "apply_updates")
_STEP_FUNCTION = "TrainStep._update"
_FORWARD_FUNCTION = "call_with_around_hooks.<locals>.call"


@dataclass(frozen=True)
class Frame:
    """A line of code.

    Example:
        from fulgurite_replay.places import Frame

        print(Frame("train.py", 12, "Net.training_step"))

    Attributes:
        file: its path.
        line: its number.
        function: the qualified name of the function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"

    @property
    def is_users(self) -> bool:
        """Whether it is in neither Fulgurite, JAX and its libraries, nor Python's own."""
        return not self.file.startswith(_list_library_folders(len(sys.modules)))

    def is_in(self, package: str) -> bool:
        """Return whether the file belongs to a package that is imported."""
        return self.file.startswith(_get_folder(package))


@dataclass(frozen=True)
class Place:
    """Where an operation is.

    Example:
        from fulgurite_replay.places import Place

        print(Place(frames=(), part="forward pass", loops=("scan iteration 2 of 5",)))

    Attributes:
        frames: the calls that led to it, the innermost first.
        part: of the step: `forward pass`, `backward pass`, `optimizer`, a plugin with its hook, or
            `step` for the rest.
        loops: the iterations and branches that it is in, the outermost first.
        layer: the path in the model of the innermost layer that it is in; None outside of all.
    """

    frames: tuple[Frame, ...]
    part: str
    loops: tuple[str, ...] = ()
    layer: str | None = None

    @property
    def user_frame(self) -> Frame | None:
        """The innermost line of the user, if there is one."""
        return next((frame for frame in self.frames if frame.is_users), None)

    @property
    def library_frame(self) -> Frame | None:
        """The innermost line outside of JAX, where that is not the user's."""
        for frame in self.frames:
            if frame.is_users:
                return None
            if not any(frame.is_in(package) for package in ("jax", "jaxlib")):
                return frame
        return None


class PlaceFinder:
    """Finds where operations of a step come from.

    Example:
        from fulgurite_replay.places import PlaceFinder

        finder = PlaceFinder(engine.plugins)

    Args:
        plugins: of the engine whose step it is.
    """

    def __init__(self, plugins: PluginManager) -> None:
        self._hooks: dict[tuple[str, str], str] = {}
        for name, caller in plugins.hooks.items():
            for plugin in caller.plugins:
                code = getattr(caller.get_function(plugin), "__code__", None)
                if code is None or plugin.activation == "core":
                    continue
                text = f"plugin {plugin.name!r}, hook {name}"
                self._hooks[code.co_filename, code.co_qualname] = text

    def find(
        self,
        equation: JaxprEqn,
        outer_frames: tuple[Frame, ...],
        scope: str,
        loops: tuple[str, ...],
    ) -> Place:
        """Return where an operation is.

        Args:
            equation: the operation.
            outer_frames: those of the operation within which it is: what is traced within a loop or
                a jitted function has the calls up to that function alone.
            scope: the name stacks of the operations within which it is.
            loops: what it is in.
        """
        frames = find_frames(equation, outer_frames)
        names = join_scopes(scope, equation)
        return Place(frames, self._find_part(frames, names), loops, find_layer(names))

    def _find_part(self, frames: Sequence[Frame], scope: str) -> str:
        part = "step"
        for frame in frames:
            hook = self._find_hook(frame)
            if hook is not None:
                part = hook
                break
            if frame.is_in("fulgurite"):
                name = frame.function.rpartition(".")[2]
                if name in _OPTIMIZER_FUNCTIONS:
                    part = "optimizer"
                    break
                if frame.function.endswith(_FORWARD_FUNCTION):
                    part = "forward pass"
                    break
        if part == "step" and (_DIFFERENTIATED in scope or find_layer(scope) is not None):
            # What JAX takes out of a `jax.checkpoint` has lost the calls that led to that.
            part = "forward pass"
        if _BACKWARD not in scope or _REPEATED in scope:
            return part
        return "backward pass" if part in ("step", "forward pass") else f"backward pass of {part}"

    def _find_hook(self, frame: Frame) -> str | None:
        """Return the plugin and hook whose function a frame is of; functions within it count."""
        name = frame.function.partition(".<locals>")[0]
        return self._hooks.get((frame.file, frame.function), self._hooks.get((frame.file, name)))


def is_backward(equation: JaxprEqn) -> bool:
    """Return whether an operation is of the backward pass, or runs one."""
    return _BACKWARD in str(equation.source_info.name_stack)


def join_scopes(scope: str, equation: JaxprEqn) -> str:
    """Return the name stack of an operation after that of those within which it is."""
    return f"{scope}/{equation.source_info.name_stack}"


def find_frames(equation: JaxprEqn, outer_frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the calls that led from the step to an operation, the innermost first.

    Args:
        equation: the operation.
        outer_frames: those of the operation within which it is.
    """
    frames = list_frames(equation.source_info.traceback, _STEP_FUNCTION)
    is_whole = bool(frames) and frames[-1].function == _STEP_FUNCTION
    return frames[:-1] if is_whole else (*frames, *outer_frames)


def list_frames(traceback: Any, root: str) -> tuple[Frame, ...]:
    """Return the calls of a traceback of jax, the innermost first, up to a function: what called
    that is the same for every operation, and perhaps a line of the user.

    Args:
        traceback: with `frames`, or None.
        root: the qualified name of the function.
    """
    if traceback is None:
        return ()
    frames = [
        Frame(frame.file_name, frame.line_num, frame.function_name) for frame in traceback.frames
    ]
    names = [frame.function for frame in frames]
    return tuple(frames[: names.index(root) + 1] if root in names else frames)


@cache
def _list_library_folders(_: int) -> tuple[str, ...]:
    """Return the folders of all code that is not the user's. It is asked again once more modules
    are imported."""
    names = [*_LIBRARIES, *_list_marked_packages()]
    # Their files and not their folder, within which `site-packages` may lie.
    standard = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in sys.stdlib_module_names
    ]
    return (*map(_get_folder, names), *filter(None, standard), "<")


def _list_marked_packages() -> list[str]:
    return [
        name
        for name, module in list(sys.modules.items())
        if "." not in name and getattr(module, _MARK, False) is True
    ]


@cache
def _get_folder(package: str) -> str:
    """Return the folder of a package, with a separator at its end; what no path begins with for a
    package that is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"
