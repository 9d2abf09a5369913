"""Paths of overrides: `model.layers[0].*.units`."""

import re
from typing import NamedTuple

from fulgurite_config.errors import ConfigError
from fulgurite_config.values import Key

SEGMENT = re.compile(r"(?:^|\.)(\*\*|\*|[^\W\d]\w*)|\[(\*|-?\d+|'[^']*'|\"[^\"]*\")\]")
MAX_PARTS = 200


class Wildcard(NamedTuple):
    """`*`, or `**`, which is deep."""

    is_deep: bool


Pattern = tuple[Key | Wildcard, ...]


def parse_path(text: str) -> Pattern:
    """Return the keys of a path such as `model.layers[0].*.units`.

    Raises:
        ConfigError: it is none, or it ends with a wildcard.
    """
    keys: list[Key | Wildcard] = []
    position = 0
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
            keys.append(part[1:-1] if part[0] in "'\"" else int(part))
        else:
            keys.append(part)
        position = match.end()
    if len(keys) > MAX_PARTS:
        raise ConfigError(f"{text[:80]!r}... has more than {MAX_PARTS} parts")
    if not keys or isinstance(keys[-1], Wildcard):
        raise ConfigError(f"{text!r} must end with the name of what is set, not with a wildcard")
    return tuple(keys)
