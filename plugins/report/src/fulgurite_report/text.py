"""Strings and numbers as people read them. What a file holds is shown as text, and obeyed by
nobody."""

import json
import math
import re
import time
from typing import Any

# Control characters but for line breaks and tabs, separators of lines, what changes the direction
# of text, and halves of surrogate pairs, which cannot be encoded.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_TIME = "%Y-%m-%d %H:%M:%S"


def as_printable(text: str) -> str:
    """Return the text with an escape, such as `\\\\u001b`, for each character that a terminal or a
    page would obey; line breaks and tabs stay."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def format_value(value: Any) -> str:
    """Return a value of JSON on one line: a string as it is, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return as_printable(text)


def format_number(value: float | None) -> str:
    """Return a number with five digits, and an empty string for None."""
    if value is None:
        return ""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.5g}"


def format_size(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # what is more has four digits when it is rounded
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_time(wall_time: float | None) -> str:
    """Return a moment in local time; nothing for one that no clock shows.

    Args:
        wall_time: seconds since 1970.
    """
    try:
        return "" if wall_time is None else time.strftime(_TIME, time.localtime(wall_time))
    except (ValueError, OverflowError, OSError):
        return ""


def format_seconds(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return ""
    if seconds < 0.9995:  # what is more is 1,000 ms when it is rounded
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
