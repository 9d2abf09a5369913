"""Secrets are not written down: their values are replaced by `***`."""

import re
from typing import Any

from fulgurite.triggers import Trigger

MASK = "***"
NAME = r"[\w.-]*(?:key|token|secret|password)[\w.-]*"
"""Pattern of names that are called like a secret, to be matched in any case."""
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"({NAME}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"']+)", re.IGNORECASE
)
_USER = re.compile(r"(\w://)[^/\s]*@")


def redact_text(text: str) -> str:
    """Return the text with `***` for user and password in a URL, and for what is assigned to a
    name that holds `key`, `token`, `secret` or `password`: `token=abc`, `{"api_key": "abc"}`."""
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def redact(value: Any, name: str = "") -> Any:
    """Return a JSON value without secrets.

    Args:
        value: the value; triggers in it become their text, and texts go through `redact_text`.
        name: what the value is called; it becomes `***` if that is like a secret.
    """
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if value is not None and _SECRET.search(name):
        return MASK
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, Trigger):
        return repr(value)
    if isinstance(value, str):
        return redact_text(value)
    return value
