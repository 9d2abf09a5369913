"""Secrets in texts are replaced by `***`.

The core needs it for one thing: the reasons of failures are records, which loggers write.
"""

import re

MASK = "***"
NAME = r"[\w.-]*(?:key|token|secret|password)[\w.-]*"
"""Pattern of names that are called like a secret, to be matched in any case."""
_ASSIGNED = re.compile(
    rf"({NAME}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"']+)", re.IGNORECASE
)
_USER = re.compile(r"(\w://)[^/\s]*@")


def redact_text(text: str) -> str:
    """Return the text with `***` for user and password in a URL, and for what is assigned to a
    name that holds `key`, `token`, `secret` or `password`: `token=abc`, `{"api_key": "abc"}`."""
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))
