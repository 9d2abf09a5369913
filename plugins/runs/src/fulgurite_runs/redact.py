"""JSON values without secrets."""

import re
from typing import Any

from fulgurite.redact import MASK, redact_text
from fulgurite.triggers import Trigger

_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


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
