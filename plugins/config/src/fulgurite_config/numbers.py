"""Numbers as they are written: those of Python and JSON, and no number in place of another."""

import math
import re

from fulgurite_config.grammar import GrammarError

MAX_DIGITS = 4_300
"""Of a whole number: Python reads and writes no longer ones."""

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(rf"[+-]?{_DIGITS}")
_OTHER_BASE = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)")
_FLOAT = re.compile(rf"[+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?")
_SPECIAL = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"[+-]?0[0-9_]*[0-9]")


def parse_number(word: str) -> int | float | None:
    """Return a word as a number if it is one by itself; `007` is none.

    Raises:
        GrammarError: it is too large for a number, or too small to be more than zero.
    """
    if _LEADING_ZERO.fullmatch(word):
        return None
    try:
        return parse_int(word)
    except GrammarError:
        raise
    except ValueError:
        pass
    try:
        return parse_float(word)
    except GrammarError:
        raise
    except ValueError:
        return None


def parse_int(word: str) -> int:
    """Return a word as a whole number.

    Raises:
        GrammarError: it has too many digits.
        ValueError: it is none.
    """
    if _OTHER_BASE.fullmatch(word):
        if len(word) <= MAX_DIGITS:
            number = int(word, 0)
            if abs(number) < 10**MAX_DIGITS:
                return number
    elif not _INT.fullmatch(word):
        raise ValueError(word)
    elif len(word.replace("_", "").lstrip("+-")) <= MAX_DIGITS:
        return int(word)
    raise GrammarError(f"a whole number has at most {MAX_DIGITS:,} digits")


def parse_float(word: str) -> float:
    """Return a word as a number with a fraction, or as infinity or not-a-number if it says so.

    Raises:
        GrammarError: it is larger than any such number, or smaller and not zero.
        ValueError: it is none.
    """
    if _SPECIAL.fullmatch(word):
        return float(word)
    if _OTHER_BASE.fullmatch(word):
        return _convert(parse_int(word))
    if not _FLOAT.fullmatch(word):
        raise ValueError(word)
    number = float(word)
    if math.isinf(number):
        raise _make_error("larger than the largest float, 1.8e308: write inf for infinity")
    if number == 0 and re.search("[1-9]", re.split("[eE]", word)[0]):
        raise _make_error("smaller than the smallest float, 5e-324: write 0")
    return number


def _convert(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        raise _make_error(
            "larger than the largest float, 1.8e308: write inf for infinity"
        ) from None


def _make_error(reason: str) -> GrammarError:
    return GrammarError(f"the number is {reason}, or put it in quotes if it is a string")
