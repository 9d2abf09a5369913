"""A bounded look at content and functions: a few characters that differ where these do.

Of arrays and files of up to 1 MiB everything counts, of larger ones 64 blocks, evenly spaced, with
the first and the last row. Of functions count their code, constants, defaults, what they enclose,
and, of their module, the values and functions that they name.
"""

import dataclasses
import dis
import functools
import hashlib
import logging
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

_BUDGET = 2**20
"""Bytes of a source that are looked at."""
_BLOCKS = 64
"""Places of a large array, and files of many, that are looked at."""
_MIN_BLOCK = 512
"""Bytes of a block, where there is room for more than two."""
_MAX_ITEMS = 256
"""Items of a list that are looked at."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), np.dtype)
_SAID_BY_REPR = (PurePath, operator.itemgetter, operator.attrgetter, operator.methodcaller)
_IGNORED_GLOBALS = (ModuleType, type, logging.Logger)


@dataclasses.dataclass(frozen=True)
class Mark:
    """What was seen of a stage.

    Attributes:
        text: a hash of what lasts: content, code, constants; empty if nothing was looked at.
        whole: a hash of this, and of what may change while a program runs, such as the state of
            objects that a function encloses; empty if there is none.
        unseen: what could not be looked into, in words.
    """

    text: str = ""
    whole: str = ""
    unseen: tuple[str, ...] = ()


class Digest:
    """A hash of values that are added one by one.

    Example:
        digest = Digest()
        digest.add(np.arange(10))
        digest.make_mark().text
    """

    def __init__(self) -> None:
        self._lasting = hashlib.sha256()
        self._whole = hashlib.sha256()
        self._num_changing = 0
        self._has_changing = False
        self._is_empty = True
        self._unseen: list[str] = []
        # What is looked at already, or being looked at: functions call themselves.
        self._seen: dict[int, Any] = {}
        self._open: set[int] = set()

    def make_mark(self) -> Mark:
        """Return what was seen so far."""
        return Mark(
            "" if self._is_empty else self._lasting.hexdigest()[:8],
            self._whole.hexdigest()[:8] if self._has_changing else "",
            tuple(dict.fromkeys(self._unseen)),
        )

    def add(self, value: Any, budget: int = _BUDGET) -> None:
        """Add a value.

        Args:
            value: an array, a number, a string, a function, or a container of such.
            budget: how many bytes of arrays to look at.
        """
        kind = type(value)
        if isinstance(value, str | bytes) and len(value) > budget:
            data = value.encode() if isinstance(value, str) else value
            self._add_array(np.frombuffer(data, np.uint8), budget)
        elif kind in _PLAIN or isinstance(value, np.dtype):
            self._write(kind.__name__, repr(value).encode())
        elif isinstance(value, Enum):
            self._write("enum", f"{kind.__qualname__}.{value.name}".encode())
        elif isinstance(value, re.Pattern):
            self.add((value.pattern, value.flags))
        elif isinstance(value, _SAID_BY_REPR):
            self._write(kind.__name__, repr(value).encode())
        elif isinstance(value, ModuleType | type | np.ufunc):
            self._write("name", f"{getattr(value, '__module__', '')}.{value.__name__}".encode())
        elif kind in (list, tuple, dict, set, frozenset):
            self._add_container(value, budget)
        elif (array := _as_array(value)) is not None:
            self._add_array(array, budget)
        elif not self._add_callable(value, budget):
            self._add_object(value, budget)

    def add_files(self, paths: Sequence[Path]) -> None:
        """Add the sizes and a part of the bytes of files; of more than 64, of 64.

        Args:
            paths: the files.
        """
        self._write("files", str(len(paths)).encode())
        numbers = choose_rows(len(paths))
        share = max(_BUDGET // max(len(numbers), 1), 2**14)
        for number in numbers:
            path = paths[number]
            is_empty = not path.stat().st_size
            self._add_array(np.empty(0, np.uint8) if is_empty else np.memmap(path, mode="r"), share)

    def _write(self, kind: str, data: bytes = b"") -> None:
        framed = f"{kind} {len(data)}:".encode() + data
        self._is_empty = False
        self._whole.update(framed)
        if not self._num_changing:
            self._lasting.update(framed)

    @contextmanager
    def _look_at_changing(self) -> Iterator[None]:
        """Let what is added in the block count for `Mark.whole` alone."""
        self._has_changing = True
        self._num_changing += 1
        try:
            yield
        finally:
            self._num_changing -= 1

    def _add_array(self, array: np.ndarray, budget: int) -> None:
        self._write("array", f"{array.dtype.str} {array.shape}".encode())
        if array.dtype.hasobject or array.dtype.kind == "T":
            self._add_items(array.reshape(-1), budget)
            return
        for block in _sample(array, budget):
            self._write("", block.tobytes())

    def _add_items(self, items: Any, budget: int) -> None:
        numbers = choose_rows(len(items), _MAX_ITEMS)
        for number in numbers:
            self.add(items[number], budget // len(numbers))

    def _add_container(self, value: Any, budget: int) -> None:
        self._write(type(value).__name__, str(len(value)).encode())
        if id(value) in self._open:
            return
        self._open.add(id(value))
        if isinstance(value, tuple | list):
            self._add_items(value, budget)
        elif isinstance(value, dict):
            self._add_items([*value.items()], budget)
        else:
            # In an order that does not depend on the hashes of the process.
            ordered = sorted(value, key=lambda entry: (type(entry).__name__, repr(entry)))
            self._add_items(ordered, budget)
        self._open.discard(id(value))

    def _add_callable(self, value: Any, budget: int) -> bool:
        """Add a function, and return whether this is one."""
        if isinstance(value, functools.partial):
            self.add(value.func, budget)
            self.add((value.args, value.keywords), budget)
        elif isinstance(value, BuiltinFunctionType):
            self._write("name", f"{value.__module__}.{value.__qualname__}".encode())
            if not isinstance(value.__self__, ModuleType | None):
                self._add_held(value.__self__, f"the object of {value.__qualname__}", budget)
        elif isinstance(value, MethodType):
            self.add(value.__func__, budget)
            self._add_held(value.__self__, f"the object of {value.__qualname__}", budget)
        elif isinstance(value, FunctionType):
            self._add_function(value, budget)
        elif isinstance(getattr(value, "__wrapped__", None), FunctionType):
            self._write("wrapped", type(value).__qualname__.encode())
            self._add_function(value.__wrapped__, budget)
        else:
            return False
        return True

    def _add_function(self, function: FunctionType, budget: int) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        names = self._add_code(function.__code__)
        self.add(function.__defaults__, budget)
        self.add(function.__kwdefaults__, budget)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._add_held(value, f"{name} in {function.__qualname__}", budget)
        for name in names:
            value = function.__globals__.get(name)
            is_ignored = isinstance(value, _IGNORED_GLOBALS)
            if not is_ignored and not _is_foreign(value, function.__module__):
                self._add_held(value, f"{name} in {function.__qualname__}", budget)

    def _add_code(self, code: CodeType) -> list[str]:
        """Add code, and return the names of globals that it only reads."""
        self._write("code", code.co_code)
        self.add(code.co_names)
        read: dict[str, None] = {}
        written = set()
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                read[instruction.argval] = None
            elif instruction.opname == "STORE_GLOBAL":
                written.add(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                read.update(dict.fromkeys(self._add_code(constant)))
            else:
                self.add(constant)
        return [name for name in read if name not in written]

    def _add_held(self, value: Any, where: str, budget: int) -> None:
        """Add what a function reads from outside; what can change may be a cache or a count."""
        num_unseen = len(self._unseen)
        if isinstance(value, list | dict | set):
            with self._look_at_changing():
                self.add(value, budget)
        else:
            self.add(value, budget)
        if len(self._unseen) > num_unseen:
            self._unseen[num_unseen:] = [f"{where}, a {type(value).__name__},"]

    def _add_object(self, value: Any, budget: int) -> None:
        kind = type(value)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        self._write("object", f"{kind.__module__}.{kind.__qualname__}".encode())
        # Of the class, which has it before what its objects may be given.
        call = next(
            (vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), 0
        )
        if isinstance(call, FunctionType):
            self._add_function(call, budget)
        state = _get_state(value)
        if state is None:
            self._unseen.append(f"a {kind.__name__}")
            return
        with self._look_at_changing():
            self.add(state, budget)


def look_at(*values: Any) -> Mark:
    """Return what is seen of values.

    Args:
        values: as of `Digest.add`.
    """
    digest = Digest()
    for value in values:
        digest.add(value)
    return digest.make_mark()


def look_at_files(paths: Sequence[Path], *values: Any) -> Mark:
    """Return what is seen of files.

    Args:
        paths: the files.
        values: what else counts, as of `Digest.add`.
    """
    digest = Digest()
    digest.add_files(paths)
    for value in values:
        digest.add(value)
    return digest.make_mark()


def choose_rows(length: int, count: int = _BLOCKS) -> list[int]:
    """Return up to `count` numbers below a length, evenly spaced, with the first and the last.

    Args:
        length: the number of numbers.
        count: how many to return at most, at least 2.
    """
    if length <= count:
        return [*range(length)]
    return [number * (length - 1) // (count - 1) for number in range(count)]


def _as_array(value: Any) -> np.ndarray | None:
    """Return an array of this or another library as that of NumPy; None if it is none."""
    kind = type(value)
    if not (hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")):
        return None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # on a device, of several processes, keys
        return None


def _is_foreign(value: Any, module: str) -> bool:
    """Return whether a global is a function of another module."""
    is_function = isinstance(value, FunctionType | BuiltinFunctionType | np.ufunc)
    is_function |= isinstance(getattr(value, "__wrapped__", None), FunctionType)
    return is_function and getattr(value, "__module__", "") != module


def _sample(array: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Yield an array whole if it has at most `budget` bytes, or blocks of it."""
    if array.nbytes <= budget or not array.ndim:
        yield array
        return
    row_bytes = array.nbytes // len(array)
    num_blocks = min(max(budget // _MIN_BLOCK, 2), _BLOCKS)
    share = budget // num_blocks
    if row_bytes > share and array.ndim > 1:
        for number in choose_rows(len(array), num_blocks):
            yield from _sample(array[number].reshape(-1), share)
        return
    size = max(share // row_bytes, 1)
    for start in choose_rows(len(array) - size + 1, num_blocks):
        yield array[start : start + size]


def _get_state(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that has nothing else; None if it may."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    bases = type(value).__mro__[:-1]
    # A class of C, or one with slots, has more than a dictionary, or no dictionary.
    is_plain = all(
        vars(base).get("__slots__", None) == () or "__dict__" in dir(base) for base in bases
    )
    has_slots = any(vars(base).get("__slots__") for base in bases)
    return vars(value) if is_plain and not has_slots and hasattr(value, "__dict__") else None
