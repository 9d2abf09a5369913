"""When two configurations are equal, and how they are shown."""

from typing import Any, cast

import fulgurite_config as fc
import numpy as np
import pytest
from fulgurite_config import ConfigError, L


class Net:
    def __init__(self, width: int, depth: float = 1.0) -> None:
        self.size = width * depth


NAME = f"{__name__}:Net"


def make_pair() -> Any:
    cfg = L(w=1)
    cfg.first = L(dict, x=cfg.ref.w, y=L(dict))
    cfg.second = L(dict, x=cfg.ref.w, y=L(dict))
    return cfg


def test_the_order_of_arguments_makes_no_difference() -> None:
    assert L(a=1, b={"x": 1, "y": 2}) == L(b={"y": 2, "x": 1}, a=1)
    assert L(Net, 1, 2.0) == L(Net, depth=2.0, width=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (0.1, 0.2),
        ([1], (1,)),
        ({1: 1}, {True: 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1, 2], [2, 1]),
        (L(Net, 1), L(Net, 2)),
        (L(Net, 1), L.partial(Net, 1)),
        (L(a=1), L(dict, a=1)),
        (L(a=1), {"a": 1}),
        (fc.Required("a"), fc.Required("b")),
    ],
)
def test_what_differs_is_not_equal(first: Any, second: Any) -> None:
    assert L(x=first) != L(x=second)
    assert L(x=first) == fc.copy(L(x=first))


def test_numbers_of_numpy_are_equal_to_those_that_json_gives_back() -> None:
    cfg = L(x=np.float64(0.1))
    assert cfg == fc.from_json(fc.to_json(cfg)) == L(x=0.1)


def test_sharing_makes_a_difference() -> None:
    node = L(dict)
    assert L(a=node, b=node) != L(a=L(dict), b=L(dict))
    assert L(a=L(dict), b=L(dict)) != L(a=node, b=node)
    assert L(a=node, b=node) == fc.copy(L(a=node, b=node))


def test_parts_of_a_configuration_are_compared_and_shown() -> None:
    cfg = make_pair()
    other = make_pair()
    assert cfg.first == cfg.second == other.first
    assert cfg.first != cfg.first.y
    assert "cfg.x = outer_1.ref.w" in repr(cfg.first)
    cfg.third = L(dict, x=cfg.ref.w + 1, y=L(dict))
    assert cfg.first != cfg.third
    other.w = 2
    assert cfg.first != other.first
    with pytest.raises(ConfigError, match="of another configuration"):
        fc.to_python(cfg.first)


def test_a_node_in_itself_can_be_shown() -> None:
    cfg = L(a=1)
    cfg.x = cfg
    assert "cfg.x = cfg" in repr(cfg)
    cfg.y = []
    cfg.y.append(lambda: 1)
    assert "is a lambda" in repr(cfg)


def test_loaded_names_have_the_arguments_of_calls() -> None:
    cfg: Any = L(NAME, 4, 0.5)
    fc.load_targets(cfg)
    assert fc.to_json(cfg) == fc.to_json(L(Net, 4, 0.5))
    assert list(fc.to_plain(cfg)) == ["$call", "width", "depth"]
    twice = L(NAME, 4, width=5)
    with pytest.raises(ConfigError, match="Net gets 'width' twice"):
        fc.load_targets(twice)
    assert cast(Any, twice)[0] == 4


def test_an_empty_section_or_dictionary_is_a_difference() -> None:
    assert fc.diff(L(a=1, part=L(), d={}), L(a=1)) == {
        "part": ("(section)", None),
        "d": ("{}", None),
    }
    assert fc.diff(L(x=L()), L(x=L(a=1))) == {"x.a": (None, "1")}


def test_the_numbers_of_shared_nodes_are_no_difference() -> None:
    first: Any = L(x=L(dict), z=(1, L(dict)))
    first.y = first.x
    first.w = [first.z[1]]
    second = fc.copy(first)
    second.before = L(dict, a=1)
    second.again = second.before
    assert list(fc.diff(first, second)) == ["before", "before.a", "again"]
    assert fc.diff(first, second)["again"] == (None, "that of before")
    moved: Any = L(new=L(dict), old=L(dict))
    moved.new_again = moved.new
    moved.old_again = moved.old
    state: Any = L(old=L(dict))
    state.old_again = state.old
    assert list(fc.diff(state, moved)) == ["new", "new_again"]
