"""The grammar of paths, such as `layers[0].weight`; `docs/selecting.md` writes it down.

This file is in two packages, byte for byte, and a test compares them. The core depends on no other
distribution, `fulgurite_config` imports neither jax nor the core, and a third distribution between
the two would be one more to install and to release for a page of code. So it imports the standard
library alone, and raises no errors: each reader says in its own words what it cannot read, and
which segments it knows.
"""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

STRING = r"""(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""

_SEGMENT = re.compile(
    rf"""\.(?P<name>[^.\[\]"\s]+)|\[(?P<quoted>{STRING})\]|\[(?P<index>[^\[\]'"]+)\]""", re.DOTALL
)
_WILDCARD = re.compile(r"[*?]")
_ESCAPE = re.compile(
    r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))""", re.DOTALL
)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPED |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}


class Token(NamedTuple):
    """A segment of a path, or what cannot be read.

    Attributes:
        kind: `name`, `quoted`, `index`, or `invalid` for all the rest of the path.
        value: the name, without quotes; what stands in brackets; or the rest.
    """

    kind: str
    value: str


def tokenize(path: str) -> Iterator[Token]:
    """Yield the segments of a path; one that cannot be read is the last."""
    text = path if path.startswith("[") or not path else f".{path}"
    position = 0
    while position < len(text):
        match = _SEGMENT.match(text, position)
        if match is None:
            yield Token("invalid", text[position:] if position else path)
            return
        kind = match.lastgroup or ""
        value = match[kind]
        yield Token(kind, unescape(value[1:-1]) if kind == "quoted" else value)
        position = match.end()


def format_name(name: str) -> str:
    """Return a name as a segment: `.weight`, or `["odd key"]` if it is not an identifier."""
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name, ensure_ascii=False)}]"


def is_pattern(name: str) -> bool:
    """Return whether a name without quotes stands for several."""
    return _WILDCARD.search(name) is not None


def is_name(name: str) -> bool:
    """Return whether a name may stand without quotes, wildcards included."""
    return _WILDCARD.sub("_", name).isidentifier()


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a name with wildcards stands for another one."""
    return fnmatchcase(name, pattern)


def unescape(text: str) -> str:
    r"""Return what stands between quotes with its escapes replaced: those of Python but for
    `\N{...}`. A backslash before any other character is one. Two halves of a surrogate pair, as
    JSON has them, are one character."""
    if "\\" not in text:
        return text
    return _PAIR.sub(_join_pair, _ESCAPE.sub(_replace_escape, text))


def _join_pair(match: re.Match[str]) -> str:
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _replace_escape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits and int(digits, 16) <= 0x10FFFF:
        return chr(int(digits, 16))
    if match[4]:
        return chr(int(match[4], 8))
    return _ESCAPED.get(match[5], match[0])
