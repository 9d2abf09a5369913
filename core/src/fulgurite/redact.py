"""Secrets in texts are replaced by `***`.

The core needs it for one thing: the reasons of failures are records, which loggers write.

A secret is known by what it is called, or by its shape: the tokens of well-known services begin in
their own way. Neither finds all of them, so a program should take secrets from the environment, or
say which values are secrets: `register_secret`.
"""

import re

MASK = "***"
# Anywhere in a name, and as a whole part of one: `author` and `sigma` are called like no secret.
_PARTS = "key|token|secret|password|passwd|pwd|credential|signature|authorization"
_WORDS = "auth|sig|header|headers|passphrase|bearer"
NAME = (
    rf"(?:[\w.-]*(?:{_PARTS})[\w.-]*|(?:[\w.-]*[._-])?(?:{_WORDS})(?:[._-][\w.-]*)?(?![A-Za-z0-9]))"
)
"""Pattern of names that are called like a secret, to be matched in any case."""
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic|Digest|Token)\s+)?[^\s,;&\"']+)"
_ASSIGNED = re.compile(rf"(?<![\w.-])({NAME}[\"']?\s*[=:]\s*){_VALUE}", re.IGNORECASE)
_OPTION = re.compile(
    rf"(?<!\S)(--?{NAME}\s+)(?!-)(?:\"[^\"]*\"|'[^']*'|[^\s,;\"']+)", re.IGNORECASE
)
_BEARER = re.compile(r"\b(Bearer\s+)[^\s,;\"']+", re.IGNORECASE)
_USER = re.compile(r"(\w://)[^/\s]*@")
_TOKEN = re.compile(
    r"\b(?:gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_\w{20,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_SECRET_NAME = re.compile(NAME, re.IGNORECASE)
# Of the whole process, because a text may come from anywhere in it, such as its command line.
_REGISTERED: set[str] = set()


def register_secret(value: str) -> None:
    """Have a value replaced wherever it stands in a text, in this process."""
    if value:
        _REGISTERED.add(value)


def redact_text(text: str) -> str:
    """Return the text with `***` for what is a secret.

    That is: what was registered; user and password in a URL; what is assigned to a name that is
    called like a secret, `token=abc` or `{"api_key": "abc"}`, or follows an option that is,
    `--passwd abc`; what follows `Bearer`; tokens of well-known services, and private keys.
    """
    # The longest first: a secret may be a part of another one, of which the rest would be left.
    for secret in sorted(_REGISTERED, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _USER.sub(rf"\1{MASK}@", text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    text = _OPTION.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _TOKEN.sub(MASK, text)


def is_secret_name(name: str) -> bool:
    """Return whether a name is called like a secret."""
    return _SECRET_NAME.fullmatch(name) is not None
