"""Paths of overrides: `model.layers[0].*.units`, in the grammar of all paths."""

import re
from typing import NamedTuple
from unicodedata import normalize

from fulgurite_config.errors import ConfigError
from fulgurite_config.grammar import check_characters
from fulgurite_config.path_grammar import (
    STRING,
    Token,
    is_name,
    is_pattern,
    matches_name,
    tokenize,
)
from fulgurite_config.values import Key

OVERRIDE = re.compile(rf"((?:\[{STRING}\]|[^=])*+)=(.*)", re.DOTALL)
KEY = re.compile(rf"(\[{STRING}\])", re.DOTALL)
INDEX = re.compile(r"-?[0-9]+")
MAX_PARTS = 200


class Wildcard(NamedTuple):
    """A segment that stands for several.

    Attributes:
        text: `*` for each name or index, `[*]` for each index, `**` for any number of levels, or a
            name with `*` or `?` in it.
    """

    text: str

    @property
    def is_deep(self) -> bool:
        """Whether it stands for any number of levels."""
        return self.text == "**"

    def matches(self, key: Key) -> bool:
        """Return whether it stands for a key of one level."""
        if self.text == "[*]":
            return isinstance(key, int)
        return self.text == "*" or (isinstance(key, str) and matches_name(self.text, key))


Pattern = tuple[Key | Wildcard, ...]


def split_override(override: str) -> tuple[str, str]:
    """Return the path and the value of a string `path=value`.

    Raises:
        ConfigError: there is no `=`, or UTF-8 cannot write the path.
    """
    parts = OVERRIDE.match(override)
    if parts is None:
        raise ConfigError(f"{override!r} is not an override: write path=value")
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
    text = normalize_path(text)
    if not text:
        raise ConfigError("there is no path before '=': write path=value")
    if text[0] in "+~":
        raise ConfigError(
            f"{text!r}: overrides add and delete nothing. Write path=value for what is there; what "
            "may be left out gets a value of its own in the configuration that says so"
        )
    keys = tuple(_read_token(token, text) for token in tokenize(text))
    if len(keys) > MAX_PARTS:
        raise ConfigError(f"{text[:80]!r}... has more than {MAX_PARTS} parts")
    if isinstance(keys[-1], Wildcard):
        raise ConfigError(f"{text!r} must end with the name of what is set, not with a wildcard")
    return keys


def _read_token(token: Token, path: str) -> Key | Wildcard:
    kind, value = token
    if kind == "quoted":
        return value
    if kind == "name" and is_name(value):
        return Wildcard(value) if is_pattern(value) else value
    if kind == "index" and value == "*":
        return Wildcard("[*]")
    if kind == "index" and INDEX.fullmatch(value):
        return int(value)
    rest = f"[{value}]" if kind == "index" else value
    raise ConfigError(f"{path!r} is not a path at {rest!r}: write a.b[0].*.c")
