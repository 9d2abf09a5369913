"""Configurations printed as the Python that builds them."""

import math
from pathlib import PurePath
from typing import Any

from fulgurite_config.codec import to_plain
from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import (
    APPLY,
    Expression,
    Lazy,
    Reference,
    format_expression,
    format_operation,
    get_expression,
    get_reference,
    is_attribute,
)
from fulgurite_config.names import get_name
from fulgurite_config.nodes import (
    OPERATIONS,
    RESERVED,
    Node,
    describe,
    get_state,
    is_constant,
    iter_children,
)
from fulgurite_config.required import Required

WIDTH = 100


def to_python(config: Any) -> str:
    """Return Python that builds a configuration, with the variable `cfg` and its imports.

    Raises:
        ConfigError: a reference leads out of the configuration, or nodes form a cycle.
    """
    to_plain(config)  # checks references and cycles
    return _write(config)


def describe_node(config: Node) -> str:
    """Return the Python of a node as `to_python` does, also of one that could not be built from it:
    what lies outside, where its references start, is called `outer_1` and so on."""
    try:
        return _write(config)
    except ConfigError as error:
        return f"<{describe(config)}: {error}>"


def _write(config: Any) -> str:
    printer = _Printer(config)
    lines = printer.write()
    return "\n".join([*printer.write_imports(), "", *lines]) + "\n"


class _Printer:
    def __init__(self, config: Any) -> None:
        self._config = config
        self._counts: dict[int, int] = {}
        self._nodes: dict[int, Node] = {}
        self._roots: set[int] = {id(config)}
        self._modules: set[str] = set()
        self._helpers = {"L"}
        self._outer_count = 0
        self._count(config)
        self._variables: dict[int, str] = {}
        if isinstance(config, Node):
            self._variables[id(config)] = "cfg"
        named = [
            node
            for key, node in self._nodes.items()
            if key in self._roots or self._counts[key] > 1 or _has_aux(node)
        ]
        owners = [node for node in named if _has_aux(node)]
        self._aux: dict[int, Any] = {
            id(get_state(node).aux): get_state(node).aux for node in owners
        }
        # Children come before the nodes that hold them.
        self._named = [
            node for node in reversed(named) if node is not config and id(node) not in self._aux
        ]
        for index, node in enumerate(reversed(self._named), 1):
            self._variables[id(node)] = f"node_{index}"
        for owner in owners:  # the aux of an aux comes after it
            self._variables[id(get_state(owner).aux)] = f"{self._variables[id(owner)]}.aux"

    def _count(self, value: Any) -> None:
        if isinstance(value, Reference):
            self._roots.add(id(get_reference(value)[0]))
        elif isinstance(value, Expression):
            for operand in get_expression(value)[1]:
                self._count(operand)
        elif isinstance(value, Node):
            self._counts[id(value)] = self._counts.get(id(value), 0) + 1
            if self._counts[id(value)] > 1:
                return
            self._nodes[id(value)] = value
        for _, child in iter_children(value):
            self._count(child)

    def write(self) -> list[str]:
        """Return the statements: first the nodes that have a name, then what they hold."""
        nodes = [self._config, *self._named] if isinstance(self._config, Node) else self._named
        lines = [f"{self._variables[id(node)]} = {self._format_call(node, [])}" for node in nodes]
        for node in [*nodes, *self._aux.values()]:
            name = self._variables[id(node)]
            for index, value in enumerate(get_state(node).positional):
                lines.append(f"{name}[{index}] = {self._format(value, 0)}")
            for key, value in get_state(node).keywords.items():
                is_plain = is_attribute(key) and key not in RESERVED
                place = f"{name}.{key}" if is_plain else f"{name}[{key!r}]"
                lines.append(f"{place} = {self._format(value, 0)}")
        if not isinstance(self._config, Node):
            lines.append(f"cfg = {self._format(self._config, 0)}")
        return lines

    def write_imports(self) -> list[str]:
        """Return the imports of what the statements use."""
        helpers = ", ".join(sorted(self._helpers))
        return [
            *(f"import {module}" for module in sorted(self._modules)),
            f"from fulgurite_config import {helpers}",
        ]

    def _format_call(self, node: Node, arguments: list[str]) -> str:
        state = get_state(node)
        if state.target is not None:
            arguments = [self._format_name(state.target), *arguments]
        function = "L.partial" if state.is_partial else "L"
        return f"{function}({', '.join(arguments)})"

    def _format_name(self, target: Any) -> str:
        module, _, qualname = get_name(target).partition(":")
        if module == "builtins":
            return qualname
        if not all(part.isidentifier() for part in module.split(".")):  # of my-prog.py
            self._helpers.add("Name")
            return f"Name({get_name(target)!r}, is_trusted=True)"
        self._modules.add(module)
        return f"{module}.{qualname}"

    def _format(self, value: Any, depth: int) -> str:
        if isinstance(value, Node):
            return self._format_node(value, depth)
        if isinstance(value, Lazy):
            return self._format_lazy(value)
        if is_constant(value):
            return _format_constant(value)
        if isinstance(value, Required):
            self._helpers.add("Required")
            return f"Required({value.description!r})"
        if isinstance(value, PurePath):
            self._modules.add("pathlib")
            return f"pathlib.Path({value.as_posix()!r})"
        if isinstance(value, list | tuple):
            return self._format_items(value, depth)
        if isinstance(value, dict):
            pairs = [
                f"{self._format(key, depth)}: {self._format(item, depth + 1)}"
                for key, item in value.items()
            ]
            return _join("{", pairs, "}", depth)
        return self._format_name(value)

    def _format_items(self, value: list[Any] | tuple[Any, ...], depth: int) -> str:
        items = [self._format(item, depth + 1) for item in value]
        if isinstance(value, list):
            return _join("[", items, "]", depth)
        return f"({items[0]},)" if len(items) == 1 else _join("(", items, ")", depth)

    def _format_lazy(self, value: Any) -> str:
        if isinstance(value, Reference):
            root, _ = get_reference(value)
            return format_expression(value, self._name_root(root))
        symbol, operands = get_expression(value)
        if symbol == APPLY:
            self._helpers.add("apply")
            texts = [self._format_name(operands[0])]
            texts += [self._format(operand, 0) for operand in operands[1:]]
            return f"apply({', '.join(texts)})"
        return format_operation(symbol, [self._format(operand, 0) for operand in operands])

    def _name_root(self, root: Node) -> str:
        """Return the variable of the node that a reference starts from, also of one outside."""
        if id(root) not in self._variables:
            self._outer_count += 1
            self._variables[id(root)] = f"outer_{self._outer_count}"
        return self._variables[id(root)]

    def _format_node(self, node: Node, depth: int) -> str:
        if id(node) in self._variables:
            return self._variables[id(node)]
        state = get_state(node)
        arguments = [self._format(value, depth + 1) for value in state.positional]
        named = {name: self._format(item, depth + 1) for name, item in state.keywords.items()}
        if all(map(is_attribute, named)):
            arguments += [f"{name}={text}" for name, text in named.items()]
        else:
            pairs = [f"{name!r}: {text}" for name, text in named.items()]
            arguments.append(f"**{_join('{', pairs, '}', depth + 1)}")
        if state.target is not None:
            arguments.insert(0, self._format_name(state.target))
        return _join("L.partial(" if state.is_partial else "L(", arguments, ")", depth)


def _format_constant(value: Any) -> str:
    """Return a constant as Python; a number of NumPy is one of Python, as it is in JSON."""
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if math.isfinite(value) else f'float("{text}")'
    if isinstance(value, str):
        return str.__repr__(value)
    return repr(value)


def _has_aux(node: Node) -> bool:
    aux = get_state(node).aux
    return aux is not None and bool(get_state(aux).keywords)


def _join(start: str, items: list[str], end: str, depth: int) -> str:
    """Join items in one line where they fit, and one a line otherwise."""
    line = f"{start}{', '.join(items)}{end}"
    if len(line) + 4 * depth <= WIDTH - 20 and "\n" not in line:
        return line
    space = "    " * (depth + 1)
    return "\n".join([start, *(f"{space}{item}," for item in items), f"{'    ' * depth}{end}"])


OPERATIONS["describe"] = describe_node
