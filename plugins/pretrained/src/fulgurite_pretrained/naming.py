"""Path maps: which array of a file belongs where in a module.

A map is a dictionary from names in the file to paths in the module. `*` in a name stands for one
segment between dots, and for each there is a `[*]` in the path. Where the module has a list there,
it is an index; where it has one array for all layers, as a stack for `scan` does, the layers of
the file are the first axis of that array. So one map serves both.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ConfigurationError, PathError, did_you_mean
from fulgurite.plugins import path_grammar

PathMap = Mapping[str, "str | Split | None"]
"""Names in a file, each with its path in the module; None for an array that is left out."""
_TRANSPOSED = ".T"


class Split(tuple[str, ...]):
    """The paths of several arrays that a file has in one, after each other along the first axis;
    where the paths end with `.T`, along the last.

    Example:
        from fulgurite_pretrained import Split

        attention = {
            "attn.in_proj_weight": Split(
                "attn.query_proj.weight", "attn.key_proj.weight", "attn.value_proj.weight"
            ),
            "attn.out_proj.weight": "attn.output_proj.weight",
        }
    """

    def __new__(cls, *paths: str) -> "Split":
        """Return the paths in their order in the file."""
        return super().__new__(cls, paths)


@dataclass(frozen=True)
class Slot:
    """A place in a module for an array of a file.

    Attributes:
        path: of an array of the module.
        index: which of a stack; empty for the array itself.
    """

    path: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """A path of a map, and the arrays of a module that it stands for.

    Attributes:
        text: as the map has it.
        is_transposed: whether the file has the transpose.
        paths: of arrays in the module, by the indices in them; None for an axis of a stack.
    """

    text: str
    is_transposed: bool
    paths: Mapping[tuple[int | None, ...], str]

    def find_slot(self, numbers: tuple[int, ...]) -> Slot | None:
        """Return the place for the array of these layers; None if the module has none."""
        for indices, path in self._find_paths(numbers):
            rest = [number for number, index in zip(numbers, indices, strict=True) if index is None]
            return Slot(path, tuple(rest))
        return None

    def _find_paths(self, numbers: tuple[int, ...]) -> Iterable[tuple[Any, str]]:
        if numbers in self.paths:  # a list, of which there may be many
            return [(numbers, self.paths[numbers])]
        return [
            (indices, path)
            for indices, path in self.paths.items()
            if None in indices
            and all(index in (None, n) for index, n in zip(indices, numbers, strict=True))
        ]


@dataclass(frozen=True)
class Rule:
    """An entry of a map.

    Attributes:
        name: the name in the file, with `*`.
        pattern: what such names match.
        targets: where they belong; several are the parts of one array, none leave it out.
    """

    name: str
    pattern: re.Pattern[str]
    targets: tuple[Target, ...]

    def find_groups(self, name: str) -> tuple[str, ...] | None:
        """Return what stands for each `*` in a name of the file; None if the name is another."""
        match = self.pattern.fullmatch(name)
        return None if match is None else match.groups()

    def make_name(self, numbers: Iterable[int | str]) -> str:
        """Return the name in the file of these layers; `*` stands for all."""
        parts = self.name.split("*")
        texts = [*map(str, numbers), ""]
        return "".join(part + text for part, text in zip(parts, texts, strict=True))


def make_rules(path_map: PathMap | None, paths: Iterable[str]) -> list[Rule]:
    """Return the entries of a map for a module.

    Args:
        path_map: the map; None where the file has the paths of the module as its names.
        paths: of the arrays of the module.

    Raises:
        ConfigurationError: an entry cannot be read, or stands for nothing in the module.
    """
    paths = list(paths)
    if path_map is None:
        return [_make_identity_rule(path) for path in paths]
    if not isinstance(path_map, Mapping):
        raise ConfigurationError(
            f"map is {type(path_map).__name__}; it must be a dictionary from names in the file to "
            "paths in the module, such as {'fc.weight': 'head.weight'}"
        )
    return [_make_rule(name, value, paths) for name, value in path_map.items()]


def _make_identity_rule(path: str) -> Rule:
    return Rule(path, re.compile(re.escape(path)), (Target(path, False, {(): path}),))


def _make_rule(name: Any, value: Any, paths: list[str]) -> Rule:
    """Return the entry of a map.

    Args:
        name: its name in the file.
        value: what the map has for it.
        paths: of the arrays of the module.
    """
    if not isinstance(name, str) or not isinstance(value, str | Split | None):
        raise ConfigurationError(
            f"map: {name!r} with {value!r}; an entry is a name in the file with a path in the "
            "module, with Split(path, path, ...), or with None for an array that is left out"
        )
    texts = (value,) if isinstance(value, str) else value or ()
    targets = tuple(_make_target(name, text, paths) for text in texts)
    if len({target.is_transposed for target in targets}) > 1:
        raise ConfigurationError(
            f"map: of the parts of {name!r} some end with .T and some do not; one array is "
            "transposed, or it is not"
        )
    pattern = "([^.]+)".join(map(re.escape, name.split("*")))
    return Rule(name, re.compile(pattern), targets)


def _make_target(name: str, text: str, paths: list[str]) -> Target:
    is_transposed = text.endswith(_TRANSPOSED)
    pattern = _compile_path(name, text.removesuffix(_TRANSPOSED))
    if pattern.groups != name.count("*"):
        raise ConfigurationError(
            f"map: {name!r} has {name.count('*')} of '*', and its path {text!r} {pattern.groups} "
            "of '[*]'; each is for the other"
        )
    matches = [(path, pattern.fullmatch(path)) for path in paths]
    known = {
        tuple(None if group is None else int(group) for group in match.groups()): path
        for path, match in matches
        if match
    }
    if not known:
        stacked = (re.sub(r"\[\d+\]", "[*]", path) for path in paths)
        raise ConfigurationError(
            f"map: the module has no array at {text!r}. {did_you_mean(text, {*paths, *stacked})}"
        )
    return Target(text, is_transposed, known)


def _compile_path(name: str, text: str) -> re.Pattern[str]:
    """Return what the paths match that an entry of a map stands for; each `[*]` is a group, which
    may be missing.

    Args:
        name: of the entry, for messages.
        text: its path, with `[*]`.
    """
    pattern = ""
    for kind, value in path_grammar.tokenize(text):
        if kind == "index" and value == "*":
            pattern += r"(?:\[(\d+)\])?"
        elif kind == "index":
            pattern += re.escape(f"[{value}]")
        elif kind == "quoted" or value.isidentifier():
            pattern += re.escape(path_grammar.format_name(value))
        else:
            raise PathError(
                f"map: cannot read the path {text!r} of {name!r} from {value!r} on; it is like "
                "blocks[*].attention.weight"
            )
    return re.compile(pattern.removeprefix(re.escape(".")))
