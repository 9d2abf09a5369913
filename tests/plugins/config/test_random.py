"""Random configurations through JSON, copies and printed Python."""

import enum
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import fulgurite_config as fc
import numpy as np
import pytest
from fulgurite_config import L, apply_overrides, from_json, to_json
from hypothesis import given, settings, strategies

Make = Callable[[Any], Any]
"""Makes a value of a configuration, which it gets for references."""


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    A = "a"


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


NAMES = strategies.sampled_from(
    [
        "a",
        "b",
        "class",
        "not",
        "a b",
        "ß",
        "ﬁ",
        "__x",
        "_config_root",
        "_config_get",
        "1",
        "",
        "x.y",
    ]
)
KEYS = strategies.one_of(
    NAMES, strategies.integers(), strategies.booleans(), strategies.just("$ref")
)
ODD_KEYS = strategies.sampled_from(
    [None, 1.5, float("inf"), PurePosixPath("x/y"), (1, "a"), Color.RED, Level.LOW, len]
)
VALUES = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(),
    strategies.floats(),
    strategies.floats().map(np.float64),
    strategies.text(max_size=4),
    strategies.sampled_from([Box, len, Color.RED, Level.LOW, Kind.A, np.str_("a")]),
    strategies.sampled_from([PurePosixPath("x"), fc.Required("a thing"), "'", "\n"]),
)


def make_lazy(kind: str, name: str) -> Make:
    makers: dict[str, Make] = {
        "sum": lambda root: root.ref[name] + 1,
        "aux": lambda root: -root.ref.aux[name],
        "root": lambda root: root.aux.ref[name] == 1.5,
        "apply": lambda root: fc.apply(max, root.ref[name], [np.float64(3), Level.LOW]),
        "item": lambda root: root.ref[name][root.ref.a],
        "node": lambda root: root.ref[name],
        "part": lambda root: root["part"].ref[name] & True,
    }
    return makers[kind]


LAZY = strategies.builds(
    make_lazy,
    strategies.sampled_from(["sum", "aux", "root", "apply", "item", "node", "part"]),
    NAMES,
)
LEAVES = strategies.one_of(VALUES.map(lambda value: lambda root: value), LAZY)


def share(make: Make) -> Make:
    def make_twice(root: Any) -> Any:
        value = make(root)
        return [value, value]

    return make_twice


def make_with_aux(make: Make) -> Make:
    def make_node(root: Any) -> Any:
        node: Any = L(Box, content=1)
        node.aux["class"] = make(root)
        node.aux.aux.deep = make(root)
        node.content = node.aux.ref["class"]
        return node

    return make_node


def extend(children: strategies.SearchStrategy[Make]) -> strategies.SearchStrategy[Make]:
    lists = strategies.lists(children, max_size=3)
    named = strategies.dictionaries(NAMES, children, max_size=3)
    keyed = strategies.dictionaries(KEYS, children, max_size=3)
    odd = strategies.dictionaries(ODD_KEYS, VALUES, max_size=3)  # no reference leads through those
    return strategies.one_of(
        lists.map(lambda makes: lambda root: [make(root) for make in makes]),
        lists.map(lambda makes: lambda root: tuple(make(root) for make in makes)),
        odd.map(lambda values: lambda root: dict(values)),
        keyed.map(lambda makes: lambda root: {key: make(root) for key, make in makes.items()}),
        named.map(lambda makes: lambda root: L(**{key: make(root) for key, make in makes.items()})),
        named.map(
            lambda makes: lambda root: L(dict, **{key: make(root) for key, make in makes.items()})
        ),
        lists.map(lambda makes: lambda root: L(max, *(make(root) for make in makes))),
        children.map(lambda make: lambda root: L.partial(Box, make(root))),
        children.map(share),
        children.map(make_with_aux),
    )


def run_printed(config: Any) -> Any:
    scope: dict[str, Any] = {}
    code = fc.to_python(config).replace(f"import {__name__}\n", "")
    exec(code.replace(f"{__name__}.", ""), dict(globals()), scope)
    return scope["cfg"]


MAKES = strategies.recursive(LEAVES, extend, max_leaves=8)


@pytest.mark.full
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, x], lambda x: {"a b": (x, 1)}])
@settings(max_examples=60, deadline=None)
@given(makes=strategies.dictionaries(NAMES, MAKES, max_size=5))
def test_random_configurations_survive_json_copies_and_print(
    wrap: Callable[[Any], Any], makes: dict[str, Make]
) -> None:
    root: Any = L(part=L(a=1))
    root.aux["a"] = 1
    for name, make in makes.items():
        root[name] = make(root)
    config = wrap(root)
    text = to_json(config)
    assert to_json(from_json(text)) == text
    assert to_json(fc.copy(config)) == text
    assert to_json(run_printed(config)) == text
    assert L(x=from_json(text)) == L(x=fc.copy(config)) == L(x=config)
    assert from_json(to_json(L(a=config, b=fc.copy_one_way(config)))).a == config
    assert repr(root)
    assert apply_overrides(fc.copy(root), []) == []


def test_printed_python_is_what_one_would_write() -> None:
    cfg = L(**{"class": 1, "level": Level.LOW, "rate": np.float64(0.1), "d": {float("inf"): 2}})
    cfg.aux["class"] = 3
    cfg.copied = cfg.ref["class"]
    cfg.free = cfg.aux.ref["class"]
    lines = fc.to_python([cfg]).splitlines()
    assert lines[3:] == [
        "node_1 = L()",
        "node_1['class'] = 1",
        f"node_1.level = {__name__}.Level.LOW",
        "node_1.rate = 0.1",
        'node_1.d = {float("inf"): 2}',
        "node_1.copied = node_1.ref['class']",
        "node_1.free = node_1.aux.ref['class']",
        "node_1.aux['class'] = 3",
        "cfg = [node_1]",
    ]


def test_a_reference_through_a_key_that_is_no_name_is_an_error() -> None:
    cfg = L(d={None: L(a=1)})
    cfg.d[None].b = cfg.d[None].ref.a
    with pytest.raises(fc.ConfigError, match=r"d\[None\]\.b refers to what lies below a key"):
        to_json(cfg)
