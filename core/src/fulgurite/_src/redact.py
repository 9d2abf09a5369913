"""Secrets in strings and values are replaced by `***`.

Everything that a run writes goes through here: the core redacts the strings of records, reasons of
failures and of stops, plugins what they write themselves.

A secret is known by what it is called, or by its shape: the tokens of well-known services begin in
their own way. Neither finds all of them, so a program should take secrets from the environment, or
say which values are secrets: `register_secret`.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, quote_plus

from fulgurite._src.triggers import Trigger

REDACTED = "***"
"""What stands in the place of a secret."""
# Anywhere in a name, and as a whole part of one: `author` and `sigma` are named like no secret.
# A tokenizer is none.
_PARTS = "key|token(?!iz)|secret|password|passwd|pwd|credential|signature|authorization|cookie"
_WORDS = "auth|sig|header|headers|passphrase|bearer|jwt"
SECRET_NAME = (
    rf"(?:[\w.-]*(?:{_PARTS})[\w.-]*|(?:[\w.-]*[._-])?(?:{_WORDS})(?:[._-][\w.-]*)?(?![A-Za-z0-9]))"
)
"""Pattern of names of secrets, to be matched in any case."""
_QUOTED = r"""(?:b?"(?:\\.|[^"\\])*"|b?'(?:\\.|[^'\\])*'|\\"[^"]*"|\\'[^']*')"""
# What is not closed ends with its line.
_BRACKETED = (
    r"(?:\{[^{}]*\}|\{[^{}\n]*|\[[^\[\]]*\]|\[[^\[\]\n]*|<[^<>\n]*>"
    r"|[\w.]*\([^()]*\)|[\w.]*\([^()\n]*)"
)
# A comma or semicolon ends a value before a space, or before another name and what it is set to:
# `a;b` may be a password. A bracket ends it where nothing else follows.
_BARE = (
    r"""(?:(?:Bearer|Basic|Digest|Token)[^\S\n]+)?"""
    r"""(?:[^\s,;&"')>\]}]|[,;](?=[^\s,;&"'])(?![A-Za-z_][\w.]*=[^=])|[)>\]}](?=[^\s,;&"')>\]}]))+"""
)
_VALUE = rf"(?:{_QUOTED}|{_BRACKETED}|{_BARE})"
_ASSIGNED = re.compile(
    rf"(?<![\w.-])({SECRET_NAME}(?:\\?[\"'])?\s*(?:=>|->|:=|==|[=:])(?:\s*(?=[\"'])|[^\S\n]*)){_VALUE}",
    re.IGNORECASE,
)
# Between an option and its value there may be what Python writes between items of a list.
_OPTION = re.compile(
    rf"(?<![\w-])((?:--?(?:{SECRET_NAME}|pass)|-p(?=[\"']\s*,))(?:[\"']\s*,\s*|\s+))(?![\"']?-)(?:{_QUOTED}|{_BARE})",
    re.IGNORECASE,
)
_BEARER = re.compile(rf"\b(Bearer\s+)(?:{_QUOTED}|{_BARE})", re.IGNORECASE)
# Such a header may have words of any number: `Authorization: Digest username="a", response="b"`.
_HEADER = re.compile(r"((?:authorization|cookie)\s*:\s*)(?![\s\"'{\[(])[^\r\n\"'`]+", re.IGNORECASE)
# A quote may be a part of a password, but not where the text around it continues.
_USER = re.compile(r"""(\w://)(?:[^/\s"'<>]|'(?![,\s:}\])]))*@""")
_TOKEN = re.compile(
    r"\b(?:gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_\w{20,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_SECRET_NAME = re.compile(SECRET_NAME, re.IGNORECASE)
_NUMERIC_SECRET = re.compile("secret|password|passwd|pwd|passphrase", re.IGNORECASE)
MIN_UNIQUE_LENGTH = 6
"""Shorter secrets are replaced as whole words only: one that is `a` stands in every string."""
# Of the whole process, because a string may come from anywhere in it, such as its command line.
_REGISTERED: set[str] = set()


class RedactedText(str):
    """A string in which secrets are replaced already, as JSON that was redacted value by value:
    read as a string, `"key": {` in it would be taken for a secret.

    Example:
        from fulgurite.plugins import RedactedText, redact_value

        redact_value('{"key": {"size": 2}}')  # '{"key": ***}'
        redact_value(RedactedText('{"key": {"size": 2}}'))  # '{"key": {"size": 2}}'
    """

    __slots__ = ()


def register_secret(value: str) -> None:
    """Have a value replaced wherever it stands in a string, in this process: as it is, and as it is
    written in URLs, in JSON, by `repr` and in base64."""
    if not value:
        return
    # What a shell passes on need not be UTF-8.
    content = value.encode(errors="surrogateescape")
    _REGISTERED.update((value, quote(content, safe=""), quote(content), quote_plus(content)))
    _REGISTERED.add(repr(value)[1:-1])
    for ensure_ascii in (True, False):
        escaped = json.dumps(value, ensure_ascii=ensure_ascii)[1:-1]
        # Twice: the path of an array has its keys in quotes, and stands in JSON itself.
        twice = json.dumps(escaped, ensure_ascii=False)[1:-1]
        _REGISTERED.update((escaped, twice))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(content).decode()
        _REGISTERED.add(encoded)
        if len(value) >= MIN_UNIQUE_LENGTH:  # of a shorter one there might be left a word
            _REGISTERED.add(encoded.rstrip("="))


def redact_registered(text: str) -> str:
    """Return the text with `***` for what was registered, and nothing else changed."""
    # The longest first: a secret may be a part of another one, of which the rest would be left.
    for secret in sorted(_REGISTERED, key=len, reverse=True):
        if len(secret) >= MIN_UNIQUE_LENGTH:
            text = text.replace(secret, REDACTED)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    return text


def redact_registered_value(value: Any) -> Any:
    """Return a JSON value with `***` for what was registered, in its strings and its keys."""
    if not _REGISTERED:
        return value  # a loop that logs each step comes here each time
    if isinstance(value, str):
        return redact_registered(value)
    if isinstance(value, dict):
        names = _choose_names(value, redact_registered)
        return {names[key]: redact_registered_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_registered_value(item) for item in value]
    return tuple(map(redact_registered_value, value)) if isinstance(value, tuple) else value


def _choose_names(keys: Iterable[Any], redact: Callable[[str], str]) -> dict[Any, Any]:
    """Return what the keys of a dictionary are called without secrets: no two of them the same, or
    a value would be lost.

    Args:
        keys: of the dictionary; those that are not strings stay.
        redact: replaces the secrets in a string.
    """
    names: dict[Any, Any] = {}
    for key in keys:
        name = base = redact(key) if isinstance(key, str) else key
        number = 1
        while name in names.values():
            number += 1
            name = f"{base} {number}"
        names[key] = name
    return names


def redact_shapes(text: str) -> str:
    """Return the text with `***` for what is known to be a secret whatever it is called: what was
    registered, private keys, user and password in a URL, what follows `Bearer`, and tokens of
    well-known services."""
    text = redact_registered(text)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _USER.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def redact_text(text: str) -> str:
    """Return the text with `***` for what is a secret.

    That is: what was registered; user and password in a URL; what is assigned to a name that is
    named like a secret, `token=abc` or `{"api_key": "abc"}`, or follows an option that is,
    `--passwd abc`; what follows `Bearer`; tokens of well-known services, and private keys.
    """
    text = redact_registered(text)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _USER.sub(rf"\1{REDACTED}@", text)
    text = _HEADER.sub(rf"\1{REDACTED}", text)
    text = _ASSIGNED.sub(rf"\1{REDACTED}", text)
    text = _OPTION.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def format_error(error: BaseException) -> str:
    """Return type and text of an error, without secrets."""
    # Not as one string: the key of a KeyError is not a secret.
    return f"{type(error).__name__}: {redact_text(str(error))}"


def redact_value(value: Any, name: str = "") -> Any:
    """Return a JSON value without secrets.

    Args:
        value: the value; triggers in it become their text, and strings go through `redact_text`.
        name: what the value is called; it becomes `***` if that is like a secret.
    """
    if isinstance(value, dict):
        names = _choose_names(value, redact_text)
        return {names[key]: redact_value(item, str(key)) for key, item in value.items()}
    if value is not None and is_secret_name(name) and not _is_count(value, name):
        return REDACTED
    if isinstance(value, list | tuple):
        return [redact_value(item) for item in value]
    if isinstance(value, Trigger):
        return repr(value)
    if isinstance(value, str) and not isinstance(value, RedactedText):
        return redact_text(value)
    return value


def _is_count(value: Any, name: str) -> bool:
    """Return whether this is a number as of `max_tokens` or `key_size`; a password may be one."""
    return isinstance(value, bool | int | float) and _NUMERIC_SECRET.search(name) is None


def is_secret_name(name: str) -> bool:
    """Return whether a name is that of a secret."""
    return _SECRET_NAME.fullmatch(name) is not None
