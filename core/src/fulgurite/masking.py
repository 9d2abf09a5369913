"""Secrets are not written down: what a command line and variables hold, with their values
masked."""

import re

MASK = "***"
NAME = r"[\w.-]*(?:key|token|secret|password)[\w.-]*"
"""What is called like a secret, in any case."""
_ASSIGNED = re.compile(
    rf"({NAME}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"']+)", re.IGNORECASE
)
_USER = re.compile(r"(\w://)[^/\s]*@")


def redact_text(text: str) -> str:
    """The text with `***` for the user and password in a URL, and for what is assigned to a name
    that holds `key`,
    `token`, `secret` or `password`: `token=abc`, `{"api_key": "abc"}`."""
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))
