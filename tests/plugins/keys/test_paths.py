"""Keys as text, and what they find in trees."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from fulgurite.errors import ConfigurationError, PathError
from fulgurite_keys import L1, Huber, build_path, register_prefix
from fulgurite_keys.paths import Index, Name, Slice, format_parts, parse, resolve
from fulgurite_keys.scope import KeyPath, Scope
from hypothesis import given, strategies as st

TREE = {
    "foo": {"bar": [1, 2, 3], "baz": ["leaf", "list", "of", "strings"]},
    "tensor": jnp.arange(240).reshape(2, 3, 5, 8),
    "odd key": 7,
}


def find(text: str, tree: Any = None) -> Any:
    return resolve(TREE if tree is None else tree, parse(text))


def test_indices_and_slices() -> None:
    tensor = TREE["tensor"]
    assert find("foo.baz[-2:]") == ["of", "strings"]
    assert (find("tensor[0,1,2]") == tensor[0, 1, 2]).all()
    assert find("tensor[None, ..., 1:, ::2]").shape == (1, 2, 3, 4, 4)
    assert (find("tensor[0,0].T") == tensor[0, 0].T).all()
    assert find("foo.bar[-3]") == 1
    assert find('["odd key"]') == 7


INDEX_ITEMS = st.one_of(
    st.integers(),
    st.none(),
    st.just(Ellipsis),
    st.builds(Slice, *[st.one_of(st.none(), st.integers())] * 3),
)
PARTS = st.one_of(
    st.builds(
        lambda text: parse(format_parts([Name(text, is_literal=True)]))[0], st.text(min_size=1)
    ),
    st.sampled_from([Name("*"), Name("**"), Name("layer?"), Index(())]),
    st.builds(lambda items: Index(tuple(items)), st.lists(INDEX_ITEMS, min_size=1)),
)


@given(st.lists(PARTS))
def test_parsing_what_was_written_is_the_identity(parts: list[Any]) -> None:
    assert parse(format_parts(parts)) == tuple(parts)


def test_wildcards_in_keys() -> None:
    children = [{}, {"a": {"c": 1}, "b": 1}, {"c": 1}, {"b": 1}]
    assert find("**.c", children) == [{"a": {"c": 1}}, {"c": 1}]
    assert find("a.*.b", {"a": {"x": {"b": 1}, "y": {"b": 2}}}) == {"x": 1, "y": 2}
    assert find("[*].b", [{"b": 1}, {"b": 2}]) == [1, 2]
    assert find("x?", {"x1": 1, "x2": 2, "y": 3}) == {"x1": 1, "x2": 2}
    with pytest.raises(PathError, match=r"no a\.y\.b .* in a\.y \(dict\).*There is: a\.y\.c"):
        find("a.*.b", {"a": {"x": {"b": 1}, "y": {"c": 2}}})
    with pytest.raises(PathError, match="There is: a"):
        find("**.z", {"a": 1})


class Point(NamedTuple):
    x: int
    y: int


class Layer(eqx.Module):
    weight: jax.Array
    size: int = eqx.field(static=True)


def test_attributes_and_keys_are_written_alike() -> None:
    layer = Layer(jnp.ones(3), 5)
    assert find("p.y", {"p": Point(1, 2)}) == 2
    assert find("[0].size", [layer]) == 5
    assert find("[7]", {7: "seven"}) == "seven"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("foo.br", r"no foo\.br .*Did you mean 'foo\.bar'\? There is: foo\.bar, foo\.baz"),
        ("foo.bar[3]", r"no foo\.bar\[3\] .* in foo\.bar \(list\)"),
        ("tensor[2]", r"\[2\] is outside of tensor, which is int32\[2, 3, 5, 8\]"),
        ("tensor[0,0,0,0,0]", "has 5 indices for tensor"),
        ("tensor.shape", r"no tensor\.shape .* in tensor \(int32"),
        ("foo..bar", "cannot read the key"),
        ("foo[1.5]", "is not an index"),
        ("foo.bar[-:]", "'-:' in the key .* is not an index"),
        ("foo.bar[:1:-]", "':1:-' in the key .* is not an index"),
        ("odd-key", "is not an identifier"),
    ],
)
def test_a_mistake_is_named_with_what_there_is(key: str, message: str) -> None:
    with pytest.raises(PathError, match=message):
        find(key)


class Sample(NamedTuple):
    image: jax.Array
    points: list[Point]


def test_typed_keys_in_a_batch() -> None:
    batch = build_path("batch", Sample)
    assert str(batch.image[:8, 0]) == "batch.image[:8,0]"
    assert str(batch.points[0].x) == "batch.points[0].x"
    assert L1(batch.image).get_keys()["preds"] == KeyPath.parse("batch.image", "")
    with pytest.raises(PathError, match="Sample has no imge, after batch. Did you mean 'image'"):
        batch.imge  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(PathError, match="Point has no z"):
        batch.points[0].z  # type: ignore[attr-defined]  # noqa: B018


def test_keys_are_read_where_the_object_is_made() -> None:
    with pytest.raises(ConfigurationError, match="Huber: targets is not set"):
        Huber("preds", None)
    with pytest.raises(TypeError, match="targets"):
        Huber("preds")  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigurationError, match="'pred.x', .* Did you mean 'preds'"):
        L1("pred.x")
    with pytest.raises(ConfigurationError, match="L1.grads.* not available to losses"):
        L1("grads.net")


def test_another_first_name() -> None:
    register_prefix(
        "test_pixels", lambda values: values["batch"]["image"].reshape(-1), per_example=False
    )
    scope = Scope({"batch": {"image": jnp.arange(4).reshape(2, 2)}}, "losses")
    assert scope.resolve(KeyPath.parse("test_pixels[3]", "")) == 3
    with pytest.raises(ConfigurationError, match="it is taken"):
        register_prefix("test_pixels", lambda values: None)
    with pytest.raises(PathError, match="'preds' is not available to losses"):
        scope.resolve(KeyPath.parse("preds", ""))
