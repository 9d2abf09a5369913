"""Edits of files that keep them past their outer checks: a value in JSON becomes another, and the
hashes of a checkpoint fit again."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint.files import compute_checksum
from fulgurite_runs.json_codec import dumps, loads

CHECKPOINT_FILES = ("COMMIT", "host-0.json", "index.json", "manifest.json", "history.json")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1.5, 1e308, "", "1", "module.first.weight", "\ud800", [], [1], {}, {"a": 1},
    {"$float": "nan"}, {"$float": "x"}, {"$bytes": "AA=="}, {"$array": [1], "dtype": "int32", "shape": [1]},
    {"$array": [1], "dtype": "S1000000000", "shape": [9, 9]}, {"$float": 10**400},
    {"$array": [300], "dtype": "int8", "shape": [1]}, {"$array": [1], "dtype": "(1,,2)i4", "shape": [1]},
    10**400, "\x1b[2J", "x" * 5000, 2**63, float("nan"), float("inf"),
)  # fmt: skip
NEW_KEYS = ("x", "", "../x", "module")

Place = tuple[Any, ...]
"""The keys and indices that lead to a value in JSON."""


def iter_places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value below one, that of the whole last."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, child in entries:
        yield from iter_places(child, (*place, key))
    yield place


def set_value(container: Any, key: Any, new_value: Any) -> None:
    container[key] = deepcopy(new_value)  # further edits may be within


def delete(container: Any, key: Any, new_value: Any) -> None:
    del container[key]


def repeat(container: Any, key: Any, new_value: Any) -> None:
    """Have what is there a second time: at the end of a list, below another key."""
    if isinstance(container, list):
        container.append(deepcopy(container[key]))
    else:
        container[NEW_KEYS[VALUES.index(new_value) % len(NEW_KEYS)]] = deepcopy(container[key])


Edit = Callable[[Any, Any, Any], None]
EDITS: tuple[Edit, ...] = (set_value, set_value, set_value, delete, repeat)


def edit_value(content: Any, number: int, edit: Edit, new_value: Any) -> Place | None:
    """Edit JSON at the place of a number, and return where that is; None if it is empty."""
    places = list(iter_places(content))[:-1]
    if not places:
        return None
    *parents, key = places[number % len(places)]
    container = content
    for parent in parents:
        container = container[parent]
    edit(container, key, new_value)
    return (*parents, key)


def edit_file(path: Path, number: int, edit: Edit, new_value: Any) -> Place:
    """Edit a file of JSON at the place of a number, and return that place."""
    content = json.loads(path.read_text())
    place = edit_value(content, number, edit, new_value)
    assert place is not None
    path.write_text(json.dumps(content))
    return place


def write_commit(checkpoint: Path, hashes: Any, commit: Any) -> None:
    """Write the hashes of the files of a checkpoint, and a `COMMIT` with the hash of those and of
    itself.

    Args:
        checkpoint: its directory.
        hashes: what `hashes-0.json` is to hold.
        commit: what `COMMIT` is to hold, whose hashes are made to fit as far as there are any.
    """
    raw = json.dumps(hashes).encode()
    (checkpoint / "hashes-0.json").write_bytes(raw)
    write_signed(checkpoint / "COMMIT", commit, hashlib.sha256(raw).hexdigest())


def write_signed(path: Path, commit: Any, hash_of_hashes: str) -> None:
    """Write a `COMMIT` with the hash of itself.

    Args:
        path: the file.
        commit: what it is to hold.
        hash_of_hashes: SHA-256 of `hashes-0.json`, which takes the place of one that is there.
    """
    if isinstance(commit, dict):
        if isinstance(commit.get("hashes"), list) and len(commit["hashes"]) == 1:
            commit["hashes"] = [hash_of_hashes]
        commit.pop("sha256", None)
        commit["sha256"] = hashlib.sha256(_encode_as_read(commit)).hexdigest()
    path.write_text(json.dumps(commit))


def _encode_as_read(commit: Any) -> bytes:
    """Return the bytes that the hash of a `COMMIT` is of; any, if it cannot be read at all."""
    text = json.dumps(commit, separators=(",", ":"))
    with suppress(ValueError, ConfigurationError):
        return dumps(loads(text)).encode()
    return text.encode()


def update_hashes(checkpoint: Path) -> None:
    """Make the hashes those of the files, as far as there still are any."""
    hashes = json.loads((checkpoint / "hashes-0.json").read_text())
    for name in CHECKPOINT_FILES[1:]:
        hashes[name] = list(compute_checksum(checkpoint / name))
    write_commit(checkpoint, hashes, json.loads((checkpoint / "COMMIT").read_text()))
