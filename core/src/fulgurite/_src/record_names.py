"""Which names records may have: those that every logger and a checkpoint can write."""

import functools
import unicodedata
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 1000
"""The longest name, as UTF-8: loggers make paths of names, and write them with every value."""
LEFT_OUT_MESSAGE = "is left out of the records"
"""What the message says of a value whose name cannot be written."""


@functools.lru_cache(maxsize=4096)  # a loop that logs each step asks for the same names each time
def find_fault(name: str) -> str | None:
    """Return what is wrong with the name of a record's source, of a value in it, or of a key in a
    configuration: "it begins with '$'"; None if every logger can write it."""
    if name.startswith("$"):
        return "it begins with '$', as the keys by which JSON holds arrays"
    if len(name.encode(errors="surrogatepass")) > MAX_BYTES:
        return f"it is longer than {MAX_BYTES:,} bytes"
    if not {".", ".."}.isdisjoint(name.split("/")):
        return "as a path it leads elsewhere"
    for character in name:
        # Control characters and halves of surrogate pairs.
        if unicodedata.category(character) in ("Cc", "Cs"):
            return f"it holds the character {character!a}"
    return None


def split_invalid_names(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values whose names can be written, and what is wrong with the other names.

    In dictionaries and lists within a value it is only what stands below such a name that is left
    out.
    """
    faults: dict[str, str] = {}
    return _select(values, faults), faults


def _select(value: Any, faults: dict[str, str]) -> Any:
    """Return a value without what has a name that cannot be written, and note what is wrong."""
    if isinstance(value, list | tuple):
        items = [_select(item, faults) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, dict):
        return value
    new_faults = dict(_iter_faults(value))
    faults |= new_faults
    return {name: _select(item, faults) for name, item in value.items() if name not in new_faults}


def _iter_faults(values: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for name in values:
        fault = find_fault(name) if isinstance(name, str) else None
        if fault is not None:
            yield name, fault
