"""Configurations as JSON. Reading imports nothing."""

import json
import math
import pathlib
from pathlib import PurePath
from typing import Any

from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import (
    APPLY,
    ITEM,
    OPERATORS,
    Expression,
    Lazy,
    Reference,
    format_path,
    get_expression,
    get_reference,
)
from fulgurite_config.grammar import GrammarError, check_characters
from fulgurite_config.names import Name, get_name
from fulgurite_config.nodes import Node, State, get_state, is_constant, iter_children
from fulgurite_config.numbers import parse_float
from fulgurite_config.required import Required

JSON_SOURCE = "JSON"
"""What is said of values that were read from a file, where others have a line of a program."""
MAX_CHARACTERS = 4_000_000
MAX_DEPTH = 100
BYTE_ORDER_MARK = "\ufeff"
"""What some editors write before a string."""
Path = tuple[str | int, ...]


def to_json(config: Any, indent: int | None = 1) -> str:
    """Return a configuration as JSON: the same text in every process.

    References stay references, and a node that is used twice is written once.

    Args:
        config: a node, or a value that a node may hold.
        indent: spaces of each level; None for all in one line.

    Raises:
        ConfigError: a reference leads out of the configuration, or nodes form a cycle.
    """
    return json.dumps(to_plain(config), indent=indent, ensure_ascii=False, allow_nan=False)


def to_plain(config: Any) -> Any:
    """Return a configuration as `to_json` writes it, as dictionaries, lists and constants."""
    try:
        return _Encoder(config).encode(config, ())
    except RecursionError:
        raise ConfigError("the configuration is nested too deeply for JSON") from None


class _Encoder:
    def __init__(self, config: Any) -> None:
        self._paths: dict[int, Path] = {}
        self._counts: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._collect(config, (), ())

    def _collect(self, value: Any, path: Path, above: tuple[int, ...]) -> None:
        """Find the first path of each node and how often it is used; refuse cycles."""
        if id(value) in above:
            raise ConfigError(f"{format_path(path)} contains itself: use a reference, cfg.ref...")
        if isinstance(value, Node):
            self._counts[id(value)] = self._counts.get(id(value), 0) + 1
            if self._counts[id(value)] > 1:
                return
            self._paths[id(value)] = path
        if isinstance(value, Expression):
            for operand in get_expression(value)[1]:
                self._collect(operand, path, above)
            return
        if len(above) > MAX_DEPTH:
            raise ConfigError(f"{format_path(path)} is nested deeper than {MAX_DEPTH} levels")
        for key, child in iter_children(value):
            self._collect(child, (*path, key), (*above, id(value)))

    def encode(self, value: Any, path: Path) -> Any:
        if isinstance(value, Node):
            return self._encode_node(value, path)
        if isinstance(value, Lazy):
            return self._encode_lazy(value, path)
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        if is_constant(value):
            _check_text(value, path)
            return value
        if isinstance(value, Required):
            return {"$required": value.description}
        if isinstance(value, PurePath):
            return {"$path": value.as_posix()}
        if isinstance(value, list):
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": self.encode(list(value), path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        return {"$name": get_name(value)}

    def _encode_dict(self, value: dict[Any, Any], path: Path) -> Any:
        pairs = [[key, self.encode(item, (*path, key))] for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[self.encode(key, path), item] for key, item in pairs]}

    def _encode_node(self, node: Node, path: Path) -> Any:
        if id(node) in self._ids:
            return {"$same": self._ids[id(node)]}
        state = get_state(node)
        form: dict[str, Any] = {}
        if state.target is None:
            form["$section"] = None
        else:
            form["$partial" if state.is_partial else "$call"] = get_name(state.target)
        if self._counts[id(node)] > 1:
            self._ids[id(node)] = len(self._ids)
            form["$id"] = self._ids[id(node)]
        if state.positional:
            form["$args"] = self.encode(state.positional, path)
        values = {name: self.encode(value, (*path, name)) for name, value in state.keywords.items()}
        if any(name.startswith("$") for name in values):
            raise ConfigError(f"{format_path(path)} has a name that begins with $")
        if state.aux is not None and get_state(state.aux).keywords:
            form["$aux"] = self.encode(state.aux, (*path, "aux"))
        return form | values

    def _encode_lazy(self, value: Any, path: Path) -> Any:
        if isinstance(value, Expression):
            symbol, operands = get_expression(value)
            return {"$op": symbol, "of": [self.encode(operand, path) for operand in operands]}
        root, keys = get_reference(value)
        if id(root) not in self._paths:
            raise ConfigError(
                f"{format_path(path)} refers to {value!r} of another configuration: make that one "
                "a part of this one, or copy the whole"
            )
        if not all(isinstance(key, str | int) for key in (*self._paths[id(root)], *keys)):
            raise ConfigError(
                f"{format_path(path)} refers to what lies below a key that is neither text nor a "
                "whole number: give that a place of its own, and refer to it there"
            )
        form: dict[str, Any] = {"$ref": list(keys)}
        if self._paths[id(root)]:
            form["from"] = list(self._paths[id(root)])
        return form


def from_json(text: str) -> Any:
    """Return the configuration that `to_json` wrote. Nothing is imported.

    Raises:
        ConfigError: the text is not a configuration, or too long or too deep for one.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"a configuration has at most {MAX_CHARACTERS:_} characters of JSON")
    try:
        form = json.loads(text, object_pairs_hook=_make_form, parse_float=parse_float)
    except GrammarError as error:
        raise ConfigError(f"this is not a configuration: {error}") from None
    except ConfigError:
        raise
    # A number of more than 4,300 digits is a ValueError alone.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not a configuration: {error}") from None
    return from_plain(form)


def from_plain(form: Any) -> Any:
    """Return the configuration of a form that `to_plain` made."""
    decoder = _Decoder()
    config = decoder.decode(form, (), 0)
    decoder.connect()
    return config


def _check_text(value: Any, path: Path) -> None:
    if not isinstance(value, str):
        return
    try:
        check_characters(value)
    except GrammarError as error:
        raise ConfigError(f"{format_path(path)}: {error}") from None


def _make_form(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) < len(pairs):
        raise ConfigError("this is not a configuration: a name occurs twice in it")
    return form


class _Decoder:
    def __init__(self) -> None:
        self._shared: dict[int, Node] = {}
        self._nodes: dict[Path, Node] = {}
        self._roots: list[tuple[Reference, Path]] = []

    def connect(self) -> None:
        """Let the references start from the nodes that they name."""
        for reference, path in self._roots:
            if path not in self._nodes:
                raise ConfigError(
                    f"a reference starts from {format_path(path)!r}: no node is there"
                )
            reference._config_root = self._nodes[path]

    def decode(self, form: Any, path: Path, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{format_path(path)[:80]} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(form, list):
            return [self.decode(item, (*path, i), depth + 1) for i, item in enumerate(form)]
        if not isinstance(form, dict):
            _check_text(form, path)
            return form
        kind = next((key for key in form if key.startswith("$")), None)
        if kind is None:
            return {key: self.decode(form[key], (*path, key), depth + 1) for key in form}
        try:
            if kind in ("$section", "$call", "$partial"):
                return self._decode_node(kind, form, path, depth)
            _check_keys(form, [kind, *MORE_KEYS.get(kind, ())], path)
            return self._decode_special(kind, form, path, depth)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{format_path(path)} has a {kind} that cannot be read") from error

    def _decode_special(self, kind: str, form: dict[str, Any], path: Path, depth: int) -> Any:
        value = form[kind]
        match kind:
            case "$same":
                return self._shared[value]
            case "$float":
                return float(value)
            case "$required":
                return Required(str(value))
            case "$path":
                return pathlib.Path(value)
            case "$name":
                return Name(value)
            case "$tuple":
                return tuple(self.decode(value, path, depth + 1))
            case "$dict":
                return dict(self._decode_pair(pair, path, depth) for pair in value)
            case "$ref":
                return self._decode_reference(form, path)
            case "$op":
                operands = [
                    self.decode(operand, (*path, f"operand {index}"), depth + 1)
                    for index, operand in enumerate(form["of"])
                ]
                return _make_expression(value, operands, path)
        raise ConfigError(f"{format_path(path)} has the unknown key {kind!r}")

    def _decode_pair(self, pair: list[Any], path: Path, depth: int) -> tuple[Any, Any]:
        key_form, item = pair
        key = self.decode(key_form, path, depth + 1)
        return key, self.decode(item, (*path, key), depth + 1)

    def _decode_reference(self, form: dict[str, Any], path: Path) -> Reference:
        keys = tuple(form["$ref"])
        root = tuple(form.get("from", ()))
        if not all(isinstance(key, str | int) for key in keys):
            raise ConfigError(f"{format_path(path)} has a reference that is not a path")
        if not all(is_constant(key) for key in root):
            raise ConfigError(f"{format_path(path)} has a reference that starts from no path")
        reference = Reference(None, keys)
        self._roots.append((reference, root))
        return reference

    def _decode_node(self, kind: str, form: dict[str, Any], path: Path, depth: int) -> Node:
        names = {name for name in form if not name.startswith("$")}
        _check_keys(form, [kind, "$id", "$args", "$aux", *names], path)
        target = None if kind == "$section" else Name(form[kind])
        state = State(target, is_partial=kind == "$partial", source=JSON_SOURCE)
        node = Node(state)
        self._nodes[path] = node
        positional = self.decode(form.get("$args", []), path, depth + 1)
        aux = self.decode(form["$aux"], (*path, "aux"), depth + 1) if "$aux" in form else None
        if not isinstance(positional, list) or not isinstance(aux, Node | None):
            raise ConfigError(f"{format_path(path)} has arguments that cannot be read")
        state.positional = positional
        state.aux = aux
        for name, value in form.items():
            if name in names:
                state.keywords[name] = self.decode(value, (*path, name), depth + 1)
                state.sources[name] = JSON_SOURCE
        # After what is in it, so that none of that can be the node itself.
        if "$id" in form and self._shared.setdefault(form["$id"], node) is not node:
            raise ConfigError(f"{format_path(path)} has the $id of another node")
        return node


MORE_KEYS = {"$ref": ("from",), "$op": ("of",)}


def _check_keys(form: dict[str, Any], known: list[str], path: Path) -> None:
    """Raise a `ConfigError` if a form has other keys than those of its kind."""
    unknown = form.keys() - set(known)
    if unknown:
        raise ConfigError(
            f"{format_path(path)} has the unknown key {min(unknown)!r} beside {known[0]!r}"
        )


def _make_expression(symbol: str, operands: list[Any], path: Path) -> Expression:
    is_function = symbol == APPLY and operands and isinstance(operands[0], Name)
    is_known = symbol in OPERATORS or symbol == ITEM
    is_operation = is_known and len(operands) == (1 if symbol in ("~", "neg") else 2)
    if not is_function and not is_operation:
        raise ConfigError(f"{format_path(path)} has an operation {symbol!r} that does not exist")
    return Expression(symbol, *operands)
