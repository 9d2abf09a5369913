"""Public names of functions and classes, and how they are looked up again."""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from fulgurite_config.errors import ConfigError, NotAllowedError

SAFE = frozenset(
    [f"builtins:{name}" for name in ("abs", "bool", "dict", "float", "int", "len", "list", "max")]
    + [f"builtins:{name}" for name in ("min", "sorted", "str", "str.join", "sum", "tuple")]
    + ["pathlib:Path", "pathlib:PurePath", "pathlib:PurePosixPath"]
)
"""What needs no permission, as it computes a value and does nothing else."""
MODULE = re.compile(r"[^\s/\\:.][^/\\:.\x00-\x1f]*")
"""A part of a module's name. A program is a module too, whatever its file is called: my-prog.py."""


@dataclass(frozen=True)
class Name:
    """The public name of a function or class that is not imported yet.

    Example:
        from fulgurite_config import L, resolve

        config = L("fractions:Fraction", 1, 2)  # nothing is imported here
        assert float(resolve(config)) == 0.5

    Attributes:
        text: `module:name`.
        is_trusted: whether it was written in a program, not read from a file.
    """

    text: str
    is_trusted: bool = field(default=False, compare=False)

    @property
    def module(self) -> str:
        """The module that is imported."""
        return self.text.partition(":")[0]

    def __post_init__(self) -> None:
        """Check the form of the name."""
        module, colon, qualname = self.text.partition(":")
        parts = [*module.split("."), *qualname.split(".")]
        is_hidden = any(part.startswith("__") for part in parts)
        is_module = all(MODULE.fullmatch(part) for part in module.split("."))
        is_qualname = all(part.isidentifier() for part in qualname.split("."))
        if not colon or is_hidden or not is_module or not is_qualname:
            raise ConfigError(f"{self.text!r} is not a name: write 'package.module:name'")


def get_name(value: Any) -> str:
    """Return the shortest public name of a function, a class or a member of an Enum.

    Raises:
        ConfigError: it has none by which it could be found again, as a lambda.
    """
    if isinstance(value, Name):
        return value.text
    if isinstance(value, Enum):
        return f"{get_name(type(value))}.{value.name}"
    module, qualname = _get_definition(value)
    shown = qualname or repr(value)
    if qualname is None or module is None:
        raise ConfigError(
            f"{shown} of type {type(value).__name__} has no public name: use a function or class "
            "of a module, or L(...) to make it later"
        )
    if "<lambda>" in qualname or "<locals>" in qualname:
        raise ConfigError(f"{shown} is a lambda or local function: define it in its module")
    for place in (*_find_public_modules(module, qualname, len(sys.modules)), module):
        if _is_at(place, qualname, value):
            return f"{_get_import_name(place)}:{qualname}"
    raise ConfigError(
        f"{module}.{qualname} is something else than this {type(value).__name__}: a bound method "
        "or a replaced function has no name; define a function in a module"
    )


@lru_cache(maxsize=4096)  # it is asked for whenever a value is set
def _find_public_modules(module: str, qualname: str, num_loaded: int) -> tuple[str, ...]:
    """Return the public modules in which something may be found, the best one first: those above
    the module that defines it, then those of its package that also have such a name.

    Args:
        module: that defines it.
        qualname: its name there.
        num_loaded: how many modules are imported. The answer may change with them.
    """
    parts = module.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    if module.startswith("_"):  # what is written in C, such as _operator:getitem
        prefixes.insert(0, module.lstrip("_"))
    public = [prefix for prefix in prefixes if _is_public(prefix)]
    if module in public:
        return tuple(public)
    # As for jax.nn.relu, which jax._src.nn.functions defines.
    first = qualname.partition(".")[0]
    others = [
        name
        for name, loaded in sys.modules.copy().items()
        if name.startswith(f"{parts[0]}.")
        and _is_public(name)
        and first in getattr(loaded, "__dict__", ())
    ]
    return (*public, *sorted(others, key=lambda name: (name.count("."), name)))


def _is_public(module: str) -> bool:
    return not any(part.startswith("_") for part in module.split("."))


def _get_definition(value: Any) -> tuple[str | None, str | None]:
    """Return the module and the qualified name that a value says of itself."""
    if isinstance(value, partial):
        return None, None
    qualname = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(getattr(value, "__objclass__", value), "__module__", None)
    is_text = isinstance(qualname, str) and isinstance(module, str)
    return (module, qualname) if is_text else (None, None)


def _is_at(module: str, qualname: str, value: Any) -> bool:
    current: Any = sys.modules.get(module)
    for part in qualname.split("."):
        current = getattr(current, part, None)
    # A class method is a new object each time it is read.
    return current is value or (current is not None and _is_class_method(value, current))


def _is_class_method(value: Any, other: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), type) and value == other


def _get_import_name(module: str) -> str:
    """Return the name by which another process imports a module, also for the main program."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if spec is not None:
        return spec.name
    if file is None:
        return module
    return file.replace("\\", "/").rpartition("/")[2].removesuffix(".py")


def is_allowed(name: Name, allow: Sequence[str]) -> bool:
    """Return whether a name may be imported, as far as its text tells.

    Args:
        name: the name.
        allow: names `module:name`, and packages and modules whose names may all be imported.
    """
    return _is_allowed_by_name(name, allow) or _is_in_package(name.module, allow)


def _is_allowed_by_name(name: Name, allow: Sequence[str]) -> bool:
    return name.is_trusted or name.text in SAFE or name.text in allow


def _is_in_package(module: str, allow: Sequence[str]) -> bool:
    # Modules of Python itself are in no package, see `check_allowed`.
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    return any(module == entry or module.startswith(f"{entry}.") for entry in allow)


def load(name: Name, allow: Sequence[str]) -> Callable[..., Any]:
    """Import what a name stands for, if that is allowed.

    Args:
        name: the name.
        allow: names `module:name` that may be imported though they were read from a file, and
            packages and modules, but not what those re-export from elsewhere.

    Raises:
        ConfigError: it is not allowed, or there is no such module or name.
    """
    module_name, _, qualname = name.text.partition(":")
    if not is_allowed(name, allow):
        raise NotAllowedError({name.text: module_name}, allow)
    try:
        current: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name.text} cannot be imported: {error}") from error
    for part in qualname.split("."):
        if not hasattr(current, part):
            raise ConfigError(f"{name.text} does not exist: {module_name} has no {part!r}")
        current = getattr(current, part)
        if isinstance(current, ModuleType):
            raise ConfigError(f"{name.text} goes through the module {part!r}: name that module")
    home = getattr(current, "__module__", None) or module_name
    if not _is_allowed_by_name(name, allow) and not _is_in_package(home, allow):
        raise NotAllowedError({name.text: home}, allow)
    return current
