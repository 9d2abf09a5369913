"""What a command imports besides what is installed: the folder of a program, and what was allowed
by name. The current directory may hold anything, such as a run that was downloaded."""

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_METADATA = ("*.dist-info", "*.egg-info")


def add_program_folder(folder: Path) -> None:
    """Let modules beside a program be imported, as if Python ran it. What the folder says that is
    installed in it offers no plugins: one could be active without being asked for.

    Args:
        folder: of the program.
    """
    if any(next(folder.glob(pattern), None) for pattern in _METADATA):
        # Importing the core takes a second, so it is done only where there is something to find.
        from fulgurite.plugins import find_installed_plugins

        find_installed_plugins()
    sys.path.insert(0, str(folder))


def find_allowed_modules_here(allow: Iterable[str]) -> None:
    """Let modules of the current directory be imported that a user allowed by name, and no others:
    an installed package may try to import one that is not installed, such as `msgpack`.

    Args:
        allow: names `module:name`, packages and modules.
    """
    modules = {entry.partition(":")[0].partition(".")[0] for entry in allow}
    sys.meta_path.append(_AllowedModules(modules, os.getcwd()))


class _AllowedModules(MetaPathFinder):
    """Finds some modules of a folder, by their names, unless they are installed.

    Args:
        modules: the names of modules and packages, without what is inside.
        folder: in which they are.
    """

    def __init__(self, modules: set[str], folder: str) -> None:
        self._modules = modules
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if path is not None or fullname not in self._modules:
            return None
        return PathFinder.find_spec(fullname, [self._folder], target)
