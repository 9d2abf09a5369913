"""Paths of overrides: `model.layers[0].*.units`."""

import re
from typing import NamedTuple
from unicodedata import normalize

from fulgurite_config.errors import ConfigError
from fulgurite_config.grammar import STRING, check_characters, unescape
from fulgurite_config.values import Key

SEGMENT = re.compile(rf"(?:^|\.)(\*\*|\*|[^\W\d]\w*)|\[(\*|-?\d+|{STRING})\]", re.DOTALL)
OVERRIDE = re.compile(rf"((?:\[{STRING}\]|[^=])*+)=(.*)", re.DOTALL)
KEY = re.compile(rf"(\[{STRING}\])", re.DOTALL)
MAX_PARTS = 200


class Wildcard(NamedTuple):
    """`*`, or `**`, which is deep."""

    is_deep: bool


Pattern = tuple[Key | Wildcard, ...]


def split_override(override: str) -> tuple[str, str]:
    """Return the path and the value of a text `path=value`.

    Raises:
        ConfigError: there is no `=`, or UTF-8 cannot write the path.
    """
    parts = OVERRIDE.match(override)
    if parts is None:
        raise ConfigError(f"{override!r} is no override: write path=value")
    check_characters(parts[1])
    return normalize_path(parts[1]), parts[2]


def normalize_path(text: str) -> str:
    """Return a path or a name with its characters as Python has them in names: an accent may be
    typed as a character of its own, as file names of macOS have them. Keys in quotes stay."""
    parts = KEY.split(text)
    return "".join(
        part if index % 2 else normalize("NFKC", part) for index, part in enumerate(parts)
    )


def parse_path(text: str) -> Pattern:
    """Return the keys of a path such as `model.layers[0].*.units`.

    Raises:
        ConfigError: it is none, or it ends with a wildcard.
    """
    keys: list[Key | Wildcard] = []
    position = 0
    text = normalize_path(text)
    if not text:
        raise ConfigError("there is no path before '=': write path=value")
    if text[0] in "+~":
        raise ConfigError(
            f"{text!r}: overrides add and delete nothing. Write path=value for what is there; what "
            "may be left out gets a value of its own in the configuration that says so"
        )
    while position < len(text):
        match = SEGMENT.match(text, position)
        if match is None:
            raise ConfigError(f"{text!r} is no path at {text[position:]!r}: write a.b[0].*.c")
        part = match[1] or match[2]
        if part in ("*", "**"):
            keys.append(Wildcard(part == "**"))
        elif match[2] is not None:
            keys.append(unescape(part[1:-1]) if part[0] in "'\"" else int(part))
        else:
            keys.append(part)
        position = match.end()
    if len(keys) > MAX_PARTS:
        raise ConfigError(f"{text[:80]!r}... has more than {MAX_PARTS} parts")
    if not keys or isinstance(keys[-1], Wildcard):
        raise ConfigError(f"{text!r} must end with the name of what is set, not with a wildcard")
    return tuple(keys)
