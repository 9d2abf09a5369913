"""JSON values without secrets."""

from typing import Any

from fulgurite.redact import MASK, is_secret_name, redact_text
from fulgurite.triggers import Trigger


class RedactedText(str):
    """A text in which secrets are replaced already, as JSON that was redacted value by value: read
    as a text, `"key": {` in it would be taken for a secret."""

    __slots__ = ()


def redact(value: Any, name: str = "") -> Any:
    """Return a JSON value without secrets.

    Args:
        value: the value; triggers in it become their text, and texts go through `redact_text`.
        name: what the value is called; it becomes `***` if that is like a secret.
    """
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if value is not None and is_secret_name(name):
        return MASK
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, Trigger):
        return repr(value)
    if isinstance(value, str) and not isinstance(value, RedactedText):
        return redact_text(value)
    return value
