"""Secrets are not written down: what a command line and variables hold, with their values masked."""

import re
from collections.abc import Sequence

MASK = "***"
_NAME = r"[\w.-]*(?:key|token|secret|password)[\w.-]*"
_ASSIGNED = re.compile(rf"({_NAME}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"']+)", re.IGNORECASE)
_OPTION = re.compile(rf"-+{_NAME}", re.IGNORECASE)
_USER = re.compile(r"(\w://)[^/\s]*@")


def masked(text: str) -> str:
    """The text with `***` for the user and password in a URL, and for what is assigned to a name that holds `key`,
    `token`, `secret` or `password`: `token=abc`, `{"api_key": "abc"}`."""
    return _ASSIGNED.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, each `masked`, and those behind an option such as `--api-key` as well."""
    hidden = [bool(_OPTION.fullmatch(before)) for before in ("", *arguments)]
    return [
        MASK if secret and not argument.startswith("--") else masked(argument)
        for secret, argument in zip(hidden, arguments, strict=False)
    ]
