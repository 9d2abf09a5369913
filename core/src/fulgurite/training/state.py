"""The state of training, and whose arrays are in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from zlib import crc32

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from fulgurite.errors import ModelError, StateError, error_context
from fulgurite.training.metric_window import MetricWindow
from fulgurite.training.nonfinite import NonFiniteTracker
from fulgurite.tree.paths import leaves_with_paths
from fulgurite.tree.typecheck import format_tree


class TrainState(eqx.Module):
    """Everything that a training step reads and writes: one pytree, donated at every step, saved in
    every checkpoint.

    Attributes:
        step: int32, the number of completed updates.
        module: the model.
        model_state: its `eqx.nn.State`, or None.
        opt_state: the state of the update rule.
        key: the root of every random stream; never changed.
        metric_window: the open metric window.
        nonfinite: the first step that was not finite, if any.
        plugin_states: the state of each plugin that has one, by the plugin's name.
    """

    step: Int[Array, ""]
    module: PyTree
    model_state: eqx.nn.State | None
    opt_state: PyTree
    key: Key[Array, ""]
    metric_window: MetricWindow
    nonfinite: NonFiniteTracker
    plugin_states: dict[str, PyTree]

    packed_fields: ClassVar[tuple[str, ...]] = ("metric_window", "nonfinite")
    """The fields that are read on the host while later steps run: they travel packed."""

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class ModelInit:
    """Where a module and its state come from: `build(arrays, key)`, traced, gives both. `given` is
    the pair and `arrays` are its arrays, unless it is yet to be made."""

    arrays: PyTree
    build: Callable[[PyTree, Key[Array, ""]], tuple[Any, "eqx.nn.State | None"]]
    model: Any = None


def as_model_init(model: Any) -> ModelInit:
    """The source of a model: a module; a pair of a module and an `eqx.nn.State`; or a callable,
    called as `model(key=key)`, that gives either. A callable's arrays are made under jit; a given
    module's are copied."""
    if isinstance(model, eqx.Module) or _is_pair(model):
        pair = _validate_model(model)
        check_not_consumed({"module": pair[0], "model_state": pair[1]})
        arrays, static = eqx.partition(pair, is_array)
        return ModelInit(arrays, lambda arrays, key: copy_arrays(eqx.combine(arrays, static)), pair)
    if not callable(model):
        kinds = "an Equinox module, (module, eqx.nn.State), or a callable that gives either, called with key="
        raise ModelError(f"a model is {kinds}; {type(model).__name__} is none of them")

    def build(_: PyTree, key: Key[Array, ""]) -> tuple[Any, eqx.nn.State | None]:
        with error_context(
            lambda: f"while the model was made, as {getattr(model, '__name__', 'model')}(key=key)"
        ):
            return copy_arrays(_validate_model(model(key=key)))

    return ModelInit(None, build)


def copy_arrays(tree: PyTree) -> PyTree:
    """A copy of every array, as a jax array; other leaves stay. Weak types are stripped: such a
    leaf would come back strong from a checkpoint and compile the step again."""

    def own(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                jnp.copy(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        return jax.lax.convert_element_type(
            jnp.array(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype)
        )

    return jax.tree.map(own, tree)


def deduplicate_arrays(state: "TrainState") -> "TrainState":
    """The state with a copy of each NumPy array, and of each that comes twice, such as an average
    made the module."""
    leaves, treedef = jax.tree.flatten(state)
    first = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)])}
    own = [
        isinstance(leaf, jax.Array) and first[id(leaf)] == place
        for place, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(
        [leaf if mine else copy_arrays(leaf) for leaf, mine in zip(leaves, own, strict=True)]
    )


def check_aliases(module: PyTree) -> None:
    """One array at two paths would be donated twice and updated as two: an error that names
    both."""
    seen: dict[int, int] = {}
    for place, leaf in enumerate(jax.tree.leaves(module)):
        if is_array(leaf) and (former := seen.setdefault(id(leaf), place)) != place:
            (one, _), (other, _) = (leaves_with_paths(module)[at] for at in (former, place))
            gap = f"{one} and {other} of {type(module).__name__} are the same array"
            raise ModelError(f"{gap}: copy one of them, or tie them with eqx.nn.Shared")


def check_has_state(module: PyTree, model_state: Any) -> None:
    """A module with layers that keep state, and no state, is an error that says how to make
    both."""
    leaves = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex))
    if model_state is None and any(isinstance(leaf, eqx.nn.StateIndex) for leaf in leaves):
        gap = f"{(name := type(module).__name__)} has layers that keep state, such as BatchNorm, but no state was given"
        raise ModelError(
            f"{gap}: give eqx.nn.make_with_state({name}), which makes both, or the pair (module, state)"
        )


def check_not_consumed(state: PyTree) -> None:
    """A state or module whose arrays were donated to a later step is an error that says so."""
    leaves = enumerate(jax.tree.leaves(state))
    if gone := [
        place for place, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()
    ]:
        what = "train state" if isinstance(state, TrainState) else "model"
        gap = f"this {what} was consumed: its {leaves_with_paths(state)[gone[0]][0]} belongs to a later step now"
        why = "`step` and `fit` consume the state they are given, module included; continue with the one they return"
        raise StateError(f"{gap}. {why}")


def check_same_structure(before: PyTree, after: PyTree, where: str) -> None:
    """What leaves a step or hook must have the structure, other leaves, shapes and dtypes that
    entered it: a slice that changed its shape would compile the step anew without a word."""
    (old, treedef), (new, other) = jax.tree.flatten(before), jax.tree.flatten(after)
    if treedef != other:
        paths = sorted(
            {path for path, _ in leaves_with_paths(before)}
            ^ {path for path, _ in leaves_with_paths(after)}
        )
        at = f" at {', '.join(paths[:3])}" if paths else " (the type or static fields of a node)"
        raise ModelError(f"{where} changed the structure of the state{at}; it must keep it")
    for place, (a, b) in enumerate(zip(old, new, strict=True)):
        if leaf_signature(a) != leaf_signature(b):
            change = f"{where} changed {leaves_with_paths(before)[place][0]} from {format_tree(a)} to {format_tree(b)}"
            raise ModelError(f"{change}; shape, dtype and other leaves must stay")


def tree_signature(tree: PyTree) -> Any:
    """What tells trees apart for which other programs are compiled: structure, shapes and dtypes,
    and other leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(map(leaf_signature, leaves))


def leaf_signature(leaf: Any) -> Any:
    """Something that tells leaves apart in a key: shape and dtype of an array, else value or
    identity."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, on the device, traced, or of NumPy."""
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def digest(tree: PyTree) -> int:
    """A number that tells apart what this process alone has of a tree's arrays."""
    number = 0
    for leaf in filter(is_array, jax.tree.leaves(tree)):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            data = (
                jax.random.key_data(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else leaf
            )
            number = crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, number)
    return number


def _validate_model(model: Any) -> tuple[Any, eqx.nn.State | None]:
    pair = model if _is_pair(model) else (model, None)
    check_has_state(*pair)
    check_aliases(pair[0])
    return pair


def _is_pair(model: Any) -> bool:
    return (
        isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State | None)
    )
