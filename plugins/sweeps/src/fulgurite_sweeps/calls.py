"""The form `name(value, key=value)` in which search spaces, samplers and pruners are written."""

import re
from typing import NamedTuple

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)
_KEYWORD = re.compile(r"([a-z_]\w*)\s*=\s*(.*)", re.DOTALL)


class Call(NamedTuple):
    """A name with arguments, all of them strings.

    Example:
        from fulgurite_sweeps.calls import parse_call

        parse_call("float(0, 1, step=0.1)")  # Call("float", ["0", "1"], {"step": "0.1"})
    """

    name: str
    arguments: list[str]
    keywords: dict[str, str]


def parse_call(text: str) -> Call | None:
    """Return what a string of the form `name(...)` says; None if it has another form.

    A string in quotes is never one, so that a value can be written that looks like a call.

    Args:
        text: what stands on the command line.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return None
    arguments: list[str] = []
    keywords: dict[str, str] = {}
    for item in match[2].split(",") if match[2].strip() else ():
        keyword = _KEYWORD.fullmatch(item.strip())
        if keyword is None:
            arguments.append(item.strip())
        else:
            keywords[keyword[1]] = keyword[2].strip()
    return Call(match[1], arguments, keywords)
