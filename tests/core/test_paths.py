import gc
import keyword
import string
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite import Selector, exclude, select
from fulgurite.errors import ConfigurationError, PathError
from fulgurite.plugins import (
    PathPattern,
    TreePath,
    find_wholes,
    leaves_with_paths,
    map_to_paths,
    parse_path,
    path_from_keys,
    resolve_path,
    shape_summary,
    total_size,
    tree_signature,
)
from hypothesis import given, strategies as st

WORDS = st.text(string.ascii_letters + "_", min_size=1)
NAMES = st.one_of(
    WORDS,
    st.text(),
    st.sampled_from(["", "odd key", 'a"b', "a\\", "a.b", "[0]", "*", "é", "\n", "ौ"]),
)
PATHS = st.lists(st.one_of(NAMES, st.integers()), max_size=6).map(TreePath)


class Pair(NamedTuple):
    left: Any
    right: Any


class Bag:
    """A node that was registered without keys."""

    def __init__(self, *items: Any) -> None:
        self.items = items


jax.tree_util.register_pytree_node(Bag, lambda bag: (bag.items, None), lambda _, items: Bag(*items))


@dataclass
class Plain:
    """A leaf for jax."""

    inner: Any


class Net(eqx.Module):
    encoder: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    table: dict[str, Any]
    numbers: dict[int, Any]
    rate: float = 0.5
    kind: str = eqx.field(static=True, default="net")


@pytest.fixture
def net() -> Net:
    linears = [eqx.nn.Linear(2, 3, key=key) for key in jax.random.split(jax.random.key(0), 3)]
    return Net(linears[0], linears[1:], {"odd key": jnp.ones(4)}, {7: jnp.zeros((2, 2), jnp.int8)})


def chosen(selector: Selector, tree: Any) -> set[str]:
    """The paths at which the selector gives True."""
    mask = selector(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    assert all(type(flag) is bool for flag in jax.tree.leaves(mask))
    return {path for path, flag in leaves_with_paths(mask) if flag}


@given(PATHS)
def test_print_then_parse_is_the_identity(path: TreePath):
    assert parse_path(str(path)) == path
    assert [type(segment) for segment in parse_path(str(path))] == [
        type(segment) for segment in path
    ]


# Strings as one writes them, made without the printer.
SEGMENTS = (
    r'\.[A-Za-z_][A-Za-z_0-9]{0,3}|\[(0|-?[1-9][0-9]{0,3})\]|\["(odd'
    r' key|a\.b|\*|\[0\]|\\"|\\\\|\\n|é-|)"\]'
)


@given(
    st.from_regex(f"({SEGMENTS}){{0,6}}", fullmatch=True).map(lambda text: text.removeprefix("."))
)
def test_parse_then_print_is_the_identity(text: str):
    assert str(parse_path(text)) == text


def test_paths_are_written_like_python():
    assert str(TreePath(["module", "layers", 0, "weight"])) == "module.layers[0].weight"
    assert str(TreePath([0, "odd key", -1, 'a"b', "class"])) == '[0]["odd key"][-1]["a\\"b"].class'
    assert str(TreePath()) == ""
    assert parse_path('plugins["evaluator:test"].x[3]') == ("plugins", "evaluator:test", "x", 3)
    assert parse_path('["plain"]') == parse_path("['plain']") == parse_path("plain")
    assert parse_path(r"a['\x62\n'].c") == ("a", "b\n", "c")
    assert all(str(TreePath([word])) == word for word in keyword.kwlist)


@pytest.mark.parametrize(
    "text",
    [
        *"""a..b .a a. a.[0] a[0]b a[ a[] a[0 a[x] a[1:] a["x] a["x'] a-b a.* ** a[*] 0""".split(),
        "a b",
    ],
)
def test_invalid_paths_are_errors(text: str):
    with pytest.raises(PathError) as caught:
        parse_path(text)
    assert repr(text) in str(caught.value)


class WholePair(eqx.Module):
    """Two arrays, of which one alone means nothing."""

    is_loaded_whole: ClassVar[bool] = True

    left: Any
    right: Any


def test_parts_of_what_is_loaded_whole_are_known_by_its_path():
    tree = {"first": WholePair(1, [2, 3]), "others": [Pair(4, 5), WholePair(6, None)]}
    assert find_wholes(tree) == {
        "first.left": "first",
        "first.right[0]": "first",
        "first.right[1]": "first",
        "others[1].left": "others[1]",
    }
    assert find_wholes(WholePair(1, 2)) == {"left": "", "right": ""}


def test_the_key_paths_of_jax_become_paths():
    tree = {
        "top": Pair([1, 2], (3,)),
        "odd key": Bag(4, 5),
        "numbers": {3: 6, -1: 7},
        "other": {(1, 2): 8},
        "flags": {True: 9},
    }
    assert dict(leaves_with_paths(tree)) == {
        "top.left[0]": 1,
        "top.left[1]": 2,
        "top.right[0]": 3,
        '["odd key"][0]': 4,
        '["odd key"][1]': 5,
        "numbers[3]": 6,
        "numbers[-1]": 7,
        'other["(1, 2)"]': 8,
        "flags.True": 9,
    }
    keys, _ = jax.tree_util.tree_leaves_with_path(tree)[0]
    assert path_from_keys(keys) == parse_path(str(path_from_keys(keys)))
    assert leaves_with_paths(5) == [("", 5)]


def test_resolving_the_path_of_a_leaf_returns_the_leaf(net: Net):
    tree = [net, Pair(Bag(1.0, {"x": 2}), ()), {(1, 2): 3, (0, 5): 4}]
    leaves = leaves_with_paths(tree)
    assert len(leaves) == 13
    assert len({path for path, _ in leaves}) == 13
    for path, leaf in leaves:
        assert resolve_path(tree, path) is leaf
        assert resolve_path(tree, parse_path(path)) is leaf


def test_nodes_are_resolved_by_attribute_index_and_key_alike(net: Net):
    assert resolve_path(net, "") is net
    assert resolve_path(net, "encoder") is net.encoder
    assert resolve_path(net, "blocks[-1].weight") is net.blocks[1].weight
    assert resolve_path(net, "numbers[7]") is net.numbers[7]
    assert resolve_path(net, 'table["odd key"]') is net.table["odd key"]
    assert resolve_path(net, "kind") == "net"
    assert resolve_path(Pair(1, Plain({"a": 2})), "right.inner.a") == 2
    assert resolve_path(Pair(1, 2), "[1]") == 2
    assert resolve_path([None], "[0]") is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "decoder",
            (
                "no decoder in Net, for the path decoder. There is: encoder, blocks, table,"
                " numbers, rate, kind"
            ),
        ),
        ("blocks[2]", "no [2] in blocks (list), for the path blocks[2]. There is: [0], [1]"),
        ("blocks[-3]", "no [-3] in blocks (list), for the path blocks[-3]. There is: [0], [1]"),
        ("table.odd", 'no odd in table (dict), for the path table.odd. There is: ["odd key"]'),
        ("numbers.x", "no x in numbers (dict), for the path numbers.x. There is: [7]"),
        (
            "encoder.bias[0]",
            (
                "no [0] in encoder.bias (float32[3]), for the path encoder.bias[0]. There is:"
                " nothing below it"
            ),
        ),
        (
            "rate.real",
            "no real in rate (float), for the path rate.real. There is: nothing below it",
        ),
    ],
)
def test_a_missing_node_is_an_error_that_lists_what_is_there(net: Net, path: str, message: str):
    with pytest.raises(PathError) as caught:
        resolve_path(net, path)
    assert str(caught.value) == message


def test_the_path_tree_has_the_same_structure(net: Net):
    paths = map_to_paths(net)
    assert jax.tree.structure(paths) == jax.tree.structure(net)
    assert paths.blocks[1].bias == "blocks[1].bias"
    assert jax.tree.leaves(paths) == [path for path, _ in leaves_with_paths(net)]


def test_sizes_count_arrays_only():
    tree = {
        "w": jnp.ones((3, 2)),
        "n": np.ones(5, np.int8),
        "f": 2.0,
        "k": jax.random.key(0),
        "s": jnp.bfloat16(1),
    }
    assert total_size(tree) == (6 + 5 + 1 + 1, 24 + 5 + 8 + 2)
    assert total_size(jax.eval_shape(lambda: {"w": jnp.ones((3, 2))})) == (6, 24)
    assert total_size({}) == (0, 0)


def test_the_shape_summary_is_a_table_with_the_total_last():
    tree = {"layers": [jnp.ones((300, 2))], "scale": jnp.float16(1), "name": "x"}
    assert [line.split() for line in shape_summary(tree).splitlines()] == [
        ["path", "shape", "dtype", "bytes"],
        ["layers[0]", "[300,", "2]", "float32", "2,400"],
        ["scale", "[]", "float16", "2"],
        ["total", "601", "2,402"],
    ]
    assert len({len(line) for line in shape_summary(tree).splitlines()}) == 1
    assert shape_summary({}).split() == ["path", "shape", "dtype", "bytes", "total", "0", "0"]


@pytest.mark.parametrize(
    ("pattern", "path", "whole", "within"),
    [
        ("lora", "more.lora.more", False, True),
        ("lora", "notlora", False, False),
        ("lora", "lora", True, True),
        ("**.attention.*.weight", "attention.query.weight", True, True),
        ("**.attention.*.weight", "net.blocks[3].attention.query.weight", True, True),
        ("**.attention.*.weight", "net.attention.weight", False, False),
        ("**.attention.*.weight", "net.attention.heads[0].query.weight", False, False),
        ("**.attention.*.weight", "net.attention.query.weight.scale", False, True),
        ("layers.*.weight", "layers[0].weight", True, True),
        ("layers[*].weight", "layers[0].weight", True, True),
        ("layers[*].weight", "layers.first.weight", False, False),
        ("layers[1]", "layers[1]", True, True),
        ("layers[1]", "layers[11]", False, False),
        ("lay*", "layers[0]", False, True),
        ("l?yers[0]", "layers[0]", True, True),
        ("lay", "layers", False, False),
        ("*", 'layers["odd key"]', False, True),
        ("layers.*", 'layers["odd key"]', True, True),
        ("odd*", '["odd key"]', True, True),
        ('["*"]', "layers", False, False),
        ('["*"]', '["*"]', True, True),
        ('["a.b"]', "a.b", False, False),
        ("a.b", "a.x.b", False, False),
        ("a.**.b", "a.b", True, True),
        ("a.**.b", "a.x[0].y.b", True, True),
        ("**", "", True, True),
        ("*", "", False, False),
        ("a.b.a.c", "a.b.a.b.a.c", False, True),
        ("**.b.**.b.c", "a.b.b.b.c", True, True),
    ],
)
def test_patterns(pattern: str, path: str, whole: bool, within: bool):
    assert PathPattern.parse(pattern).matches(parse_path(path)) is whole
    assert PathPattern.parse(pattern).occurs_in(parse_path(path)) is within


@given(PATHS.filter(bool))
def test_a_path_without_wildcards_is_a_pattern_for_itself_alone(path: TreePath):
    literal = "".join(f"[{_json(key)}]" if isinstance(key, str) else f"[{key}]" for key in path)
    pattern = PathPattern.parse(literal)
    assert pattern.matches(path)
    assert not pattern.matches(TreePath([*path, "x"]))
    assert pattern.occurs_in(TreePath([0, *path, "x"]))
    assert not pattern.matches(TreePath([*path[:-1], f"{path[-1]}x"]))


def _json(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\"}
    return (
        '"'
        + "".join(
            escapes.get(char, char if char >= " " else f"\\u{ord(char):04x}") for char in text
        )
        + '"'
    )


@pytest.mark.parametrize("text", ["", "a..b", "a[1:]", "a["])
def test_invalid_patterns_are_errors(text: str):
    with pytest.raises(PathError):
        PathPattern.parse(text)
    with pytest.raises(PathError):
        select(text)


def test_select_matches_whole_segments_and_exclude_is_its_complement():
    tree = {"more": {"lora": {"more": jnp.ones(1)}}, "notlora": jnp.ones(1), "rate": 0.1}
    assert chosen(select("lora"), tree) == {"more.lora.more"}
    assert chosen(exclude("lora"), tree) == {"notlora"}


def test_a_pattern_chooses_arrays_only(net: Net):
    assert chosen(select("**"), net) == {
        path for path, leaf in leaves_with_paths(net) if eqx.is_array(leaf)
    }
    assert chosen(select("weight"), net) == {
        "encoder.weight",
        "blocks[0].weight",
        "blocks[1].weight",
    }
    assert chosen(select("blocks[1]", "encoder.bias"), net) == {
        "blocks[1].weight",
        "blocks[1].bias",
        "encoder.bias",
    }


def test_a_negative_index_counts_from_the_end_of_the_list(net: Net):
    assert chosen(select("blocks[-1]"), net) == {"blocks[1].weight", "blocks[1].bias"}
    assert chosen(select("blocks[-2].weight"), net) == {"blocks[0].weight"}
    assert chosen(exclude("blocks[-1]"), net) == chosen(~select("blocks[1]"), net)
    # The last item counts even where it holds no array; and -1 may be a key.
    tree = {"layers": [jnp.ones(1), jnp.ones(2), None], "by_offset": {-1: jnp.ones(3)}}
    assert chosen(select("layers[-2]"), tree) == {"layers[1]"}
    assert chosen(select("by_offset[-1]"), tree) == {"by_offset[-1]"}
    for missing in ("layers[-1]", "layers[-4]"):
        with pytest.raises(PathError, match="selects no array"):
            select(missing)(tree)


def test_a_function_chooses_nodes_and_leaves(net: Net):
    assert chosen(select(lambda m: m.encoder), net) == {"encoder.weight", "encoder.bias"}
    assert chosen(select(lambda m: m.numbers[7]), net) == {"numbers[7]"}
    assert chosen(select(lambda m: (m.blocks[0], m.encoder.bias)), net) == {
        "blocks[0].weight",
        "blocks[0].bias",
        "encoder.bias",
    }
    assert chosen(select(lambda m: m), net) == chosen(select("**"), net)
    assert chosen(select("table", lambda m: m.encoder.bias), net) == {
        "encoder.bias",
        'table["odd key"]',
    }


def test_a_function_distinguishes_equal_and_shared_leaves():
    shared = jnp.ones(2)
    tree = {"a": (shared,), "b": (shared,), "c": [None, shared]}
    tree["d"] = tree["a"]
    assert chosen(select(lambda t: t["d"]), tree) == {"d[0]"}
    assert chosen(select(lambda t: (t["a"], t["c"])), tree) == {"a[0]", "c[1]"}


def test_selectors_see_shapes_in_place_of_arrays(net: Net):
    shapes = eqx.filter_eval_shape(lambda: net)
    for selector in (select("bias"), select(lambda m: m.blocks), exclude("table")):
        assert chosen(selector, shapes) == chosen(selector, net)


def test_selectors_combine_with_or_and_and_not(net: Net):
    blocks, weights = select("blocks"), select("weight")
    assert chosen(blocks & weights, net) == {"blocks[0].weight", "blocks[1].weight"}
    assert chosen(blocks | weights, net) == chosen(blocks, net) | {"encoder.weight"}
    assert (
        chosen(~blocks, net)
        == chosen(exclude("blocks"), net)
        == chosen(select("encoder", "table", "numbers"), net)
    )
    assert chosen(~(blocks | weights), net) == {"encoder.bias", "numbers[7]", 'table["odd key"]'}
    assert chosen(~~blocks, net) == chosen(blocks, net)
    assert chosen(~(select("blocks[0]") & select("blocks[1]")), net) == chosen(select("**"), net)


def test_an_empty_selection_is_an_error_that_lists_the_nearest_paths(net: Net):
    missing = select("decoder")
    for selector in (
        missing,
        exclude("decoder"),
        select("bias", "decoder"),
        select("bias") | missing,
    ):
        with pytest.raises(PathError, match=r"'decoder' selects no array of Net.*encoder\.weight"):
            selector(net)
    with pytest.raises(PathError, match="'rate' selects no array"):
        select("rate")(net)
    with pytest.raises(PathError, match=r"select\('encoder'\) & select\('table'\)"):
        (select("encoder") & select("table"))(net)
    with pytest.raises(PathError, match=r"~select\('\*\*'\)"):
        exclude("**")(net)


def test_the_nearest_paths_come_first():
    tree = {f"layer{index}": {"kernel": jnp.ones(1)} for index in range(20)} | {
        "decoder": {"weight": jnp.ones(1)}
    }
    with pytest.raises(PathError, match=r"of its 21 the nearest are: decoder\.weight,"):
        select("decoder.wieght")(tree)


def pick_generator(module: Any) -> Any:
    return module.generator


def test_a_function_that_returns_no_node_is_an_error_that_names_it(net: Net):
    with pytest.raises(PathError, match=r"pick_generator cannot select from Net: .*generator"):
        select(pick_generator)(net)
    with pytest.raises(PathError, match="cannot select from Net"):
        select(lambda m: m.blocks[5])(net)
    with pytest.raises(PathError, match="cannot select from Net"):
        select(lambda m: m.encoder.weight + 1)(net)
    with pytest.raises(PathError, match="must return a node of Net"):
        select(lambda m: m.kind)(net)
    with pytest.raises(PathError, match="selects no array of Net"):
        select(lambda m: m.rate)(net)
    with pytest.raises(ConfigurationError, match="need a pattern or a function"):
        select()


@pytest.mark.full
def test_a_signature_holds_a_leaf_without_hash_so_that_no_other_gets_its_place() -> None:
    class Unhashable:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    leaf = Unhashable()
    signature = tree_signature({"a": leaf})
    assert signature == tree_signature({"a": leaf})
    assert signature != tree_signature({"a": Unhashable()})
    reference = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert reference() is not None and hash(signature)
