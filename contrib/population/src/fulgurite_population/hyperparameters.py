"""Hyperparameters in optimizer states: which there are, and what they are for each member."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from fulgurite.errors import ConfigurationError, did_you_mean
from jaxtyping import Array, PyTree


def set_hyperparameters(
    opt_state: PyTree, values: Mapping[str, Array], paths: Collection[str]
) -> PyTree:
    """Return an optimizer state with hyperparameters of each member.

    Args:
        opt_state: with the states of `optax.inject_hyperparams`, stacked over members.
        values: `(members,)` each, by name.
        paths: of the arrays of the module, which may have been meant.

    Raises:
        ConfigurationError: the state has no such hyperparameter, or a schedule computes it.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(opt_state)
    names = [find_varied(path, values) for path, _ in leaves]
    scheduled = {name for path, _ in leaves for name in _list_scheduled(path)}
    known = {name for path, _ in leaves for name in list_names(path)}
    for name in values:
        if name in scheduled:
            raise ConfigurationError(
                f"Population: vary has {name!r}, which a schedule recomputes at each step: give "
                "optax.inject_hyperparams a number for it. To scale a schedule, chain "
                "optax.inject_hyperparams(optax.scale)(step_size=1.0) behind the optimizer, and "
                "vary step_size"
            )
        if name not in known:
            raise ConfigurationError(
                f"Population: vary has {name!r}, which is neither the path of an array of the "
                "module nor a hyperparameter in the optimizer's state. "
                f"{did_you_mean(name, {*known, *paths})} A hyperparameter is made "
                "by optax.inject_hyperparams(optax.adam)(learning_rate=...). What is not an array, "
                "such as a width, cannot be vmapped: use a sweep of several runs"
            )
    replaced = [
        leaf if name is None else _convert_values(name, values[name], leaf)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    return tree.unflatten(replaced)


def list_hyperparameters(opt_state: PyTree) -> dict[str, Array]:
    """Return the hyperparameters in an optimizer state by name, those of one optimizer among
    several as `g/learning_rate`.

    Args:
        opt_state: of a run of its own.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    return {names[0]: leaf for path, leaf in leaves if (names := list_names(path))}


def list_names(path: Sequence[Any]) -> list[str]:
    """Return the names by which the hyperparameter at a path of an optimizer state may vary, that
    of one optimizer among several first; none for another array."""
    is_inside = len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams"
    return _list_full_names(path, str(path[-1].key)) if is_inside else []


def find_varied(path: Sequence[Any], names: Collection[str]) -> str | None:
    """Return by which of these names the array at a path of an optimizer state varies, if it does.

    Args:
        path: in the optimizer state.
        names: of hyperparameters that vary.
    """
    return next((name for name in list_names(path) if name in names), None)


def _list_scheduled(path: Sequence[Any]) -> list[str]:
    """Return the names of the hyperparameter whose schedule has its state at a path of an optimizer
    state; none for another array."""
    for key, next_key in itertools.pairwise(path):
        if getattr(key, "name", None) == "hyperparams_states":
            return _list_full_names(path, str(next_key.key))
    return []


def _list_full_names(path: Sequence[Any], name: str) -> list[str]:
    optimizer = getattr(path[0], "key", None)
    return [f"{optimizer}/{name}", name] if isinstance(optimizer, str) else [name]


def _convert_values(name: str, values: Array, leaf: Array) -> Array:
    """Return the values of all members as what they replace in the stacked optimizer state."""
    if values.shape != leaf.shape:
        raise ConfigurationError(
            f"Population: vary[{name!r}] has the shape {values.shape}, and the hyperparameter of "
            f"all members has {leaf.shape}"
        )
    return values.astype(leaf.dtype)
