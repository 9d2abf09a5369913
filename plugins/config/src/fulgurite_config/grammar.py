"""The grammar of values: strings, words, and both in brackets.

`docs/command-line.md` writes it down for users. Here is what it says of form alone; `values` says
what a form means for an annotation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulgurite_config.errors import ConfigError
from fulgurite_config.path_grammar import STRING, unescape

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 100
QUOTES = ("'", '"')
CLOSERS = {"(": ")", "[": "]", "{": "}"}
BRACKETS = tuple(CLOSERS)

_STRING = re.compile(STRING, re.DOTALL)
_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r"[^\s,:()\[\]{}'\"]+")


class GrammarError(ConfigError):
    """A string is not a value. The message says why without quoting it: it may be a secret."""


@dataclass(frozen=True)
class Term:
    """A value as it is written.

    Attributes:
        text: as it stands.
    """

    text: str


@dataclass(frozen=True)
class Word(Term):
    """What stands in neither quotes nor brackets: a number, `true`, a string."""


@dataclass(frozen=True)
class Quoted(Term):
    """A string in quotes.

    Attributes:
        value: without the quotes.
    """

    value: str


@dataclass(frozen=True)
class Items(Term):
    """Values with commas between them.

    Attributes:
        bracket: what it begins with, `(` or `[`; empty without brackets.
        items: the values.
        has_comma: whether there is a comma, which `(3)` has not.
    """

    bracket: str
    items: Sequence[Term]
    has_comma: bool


@dataclass(frozen=True)
class Pairs(Term):
    """Keys and values in braces.

    Attributes:
        pairs: the keys, each with its value.
    """

    pairs: Sequence[tuple[Term, Term]]


@dataclass(frozen=True)
class Malformed(Term):
    """What can be a string as it stands, and nothing else.

    Attributes:
        error: why.
    """

    error: GrammarError


def parse_term(text: str) -> Term:
    """Return a whole string as a term."""
    try:
        items = _parse_all(text)
    except GrammarError as error:
        return Malformed(text, error)
    if len(items.items) == 1 and not items.has_comma:
        return _keep_text(items.items[0], text)
    return items if items.items else Word(text)


def split_items(text: str) -> list[str]:
    """Return the values between the commas of a string, each as it is written.

    Raises:
        GrammarError: one is missing, or a bracket or a quote is not closed.
    """
    return [item.text for item in _parse_all(text).items]


def check_characters(text: str) -> None:
    """Raise a `GrammarError` if a string has characters that UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"character {error.start + 1} is half of a surrogate pair, or stands for a byte that "
            f"is not UTF-8, and no file can hold it: write it in UTF-8"
        ) from None


def _keep_text(term: Term, text: str) -> Term:
    """Return the only term of a string. A string is it as it stands, with the spaces around it."""
    if isinstance(term, Quoted):
        return term if term.text == text else Word(text)
    if isinstance(term, Items):
        return Items(text, term.bracket, term.items, term.has_comma)
    return Pairs(text, term.pairs) if isinstance(term, Pairs) else Word(text)


def _parse_all(text: str) -> Items:
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(
            f"a value has at most {MAX_CHARACTERS:_} characters: let the program read it from a "
            "file"
        )
    check_characters(text)
    return _Parser(text).parse_all()


class _Parser:
    """Reads a string from left to right.

    Args:
        text: what is read.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def parse_all(self) -> Items:
        """Return what stands between the commas of the whole string."""
        items, has_comma = self._parse_items("", 0)
        return Items(self._text, "", items, has_comma)

    def _parse_items(self, closer: str, depth: int) -> tuple[list[Term], bool]:
        """Return the terms up to a closing bracket, which is read too, and whether there was a
        comma.

        Args:
            closer: the bracket; empty for the end of the text.
            depth: how many brackets are open.
        """
        items: list[Term] = []
        has_comma = False
        while not self._is_at(closer):
            items.append(self._parse_term(("," + closer), depth))
            if self._is_at(closer):
                break
            has_comma = True
            self._position += 1  # the comma: nothing else ends a term
        self._position += len(closer)
        return items, has_comma

    def _parse_pairs(self, depth: int) -> list[tuple[Term, Term]]:
        pairs: list[tuple[Term, Term]] = []
        while not self._is_at("}"):
            key = self._parse_term(":,}", depth)
            if not self._is_at(":"):
                raise GrammarError("braces hold keys and values: {'a': 1, 'b': 2}")
            self._position += 1
            pairs.append((key, self._parse_term(",}", depth)))
            if self._is_at("}"):
                break
            self._position += 1
        self._position += 1
        return pairs

    def _parse_term(self, stops: str, depth: int) -> Term:
        """Return the term up to one of several characters, or up to the end of the text.

        Args:
            stops: the characters.
            depth: how many brackets are open.
        """
        self._skip_space()
        start = self._position
        first = self._peek()
        if first in QUOTES:
            return self._parse_string(stops)
        group = self._parse_group(depth) if first in BRACKETS else None
        if group is not None and self._has_reached(stops):
            return group
        self._skip_word(stops, depth)
        word = self._text[start : self._position].rstrip()
        if not word:
            raise GrammarError("a value is missing beside a comma or a bracket")
        return Word(word)

    def _parse_string(self, stops: str) -> Quoted:
        match = _STRING.match(self._text, self._position)
        if match is None:
            raise GrammarError(
                f"the quote {self._peek()} is not closed: write \\{self._peek()} for one that is "
                "part of a string"
            )
        self._position = match.end()
        if not self._has_reached(stops):
            raise GrammarError("after a string in quotes must come a comma or the end")
        value = unescape(match[0][1:-1])
        check_characters(value)
        return Quoted(match[0], value)

    def _parse_group(self, depth: int, is_in_word: bool = False) -> Term:
        """Return what stands in brackets.

        Args:
            depth: how many brackets are open before.
            is_in_word: whether this is a part of a word, in which braces may hold anything:
                `${HOME}/data`.
        """
        if depth >= MAX_DEPTH:
            raise GrammarError(f"a value has at most {MAX_DEPTH} brackets in each other")
        start = self._position
        bracket = self._text[start]
        self._position += 1
        if bracket == "{" and not is_in_word:
            pairs = self._parse_pairs(depth + 1)
            return Pairs(self._text[start : self._position], pairs)
        items, has_comma = self._parse_items(CLOSERS[bracket], depth + 1)
        if has_comma and not items:
            raise GrammarError("a value is missing beside a comma or a bracket")
        return Items(self._text[start : self._position], bracket, items, has_comma)

    def _skip_word(self, stops: str, depth: int) -> None:
        """Go to the end of a word. Brackets in it are closed in it: `f(1, 2)`."""
        while self._position < len(self._text):
            character = self._text[self._position]
            if character in stops:
                return
            if character in BRACKETS:
                self._parse_group(depth, is_in_word=True)
                continue
            if character in CLOSERS.values():
                raise GrammarError(f"the bracket {character} closes none")
            match = _PLAIN.match(self._text, self._position)
            self._position = match.end() if match else self._position + 1

    def _is_at(self, character: str) -> bool:
        """Return whether a character comes next, apart from spaces; an empty one is the end.

        Raises:
            GrammarError: the end comes and something else is expected.
        """
        self._skip_space()
        if self._position < len(self._text):
            return self._text[self._position] == character
        if not character:
            return True
        raise GrammarError(
            f"a bracket is not closed: {character} is missing. Put a string with brackets in quotes"
        )

    def _has_reached(self, stops: str) -> bool:
        self._skip_space()
        return self._peek() in stops

    def _peek(self) -> str:
        """Return the next character, or an empty string at the end."""
        return self._text[self._position : self._position + 1]

    def _skip_space(self) -> None:
        match: Any = _SPACE.match(self._text, self._position)
        self._position = match.end()
