"""Hyperparameters in optimizer states: which there are, and what they are for each member."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, did_you_mean
from jaxtyping import Array, PyTree


def set_hyperparameters(
    opt_state: PyTree, values: Mapping[str, np.ndarray], paths: Collection[str]
) -> PyTree:
    """Return an optimizer state with hyperparameters of each member.

    Args:
        opt_state: with the states of `optax.inject_hyperparams`, stacked over members.
        values: `(members,)` each, by name; a name is that of all hyperparameters called so.
        paths: of the arrays of the module, which may have been meant.

    Raises:
        ConfigurationError: the state has no such hyperparameter, a schedule computes it, or it
            cannot have these values.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(opt_state)
    names = [find_varied(path, values) for path, _ in leaves]
    scheduled = list_scheduled(opt_state)
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
        leaf if name is None else convert_values(name, values[name], leaf)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    return tree.unflatten(replaced)


def list_hyperparameters(opt_state: PyTree) -> dict[str, list[Array]]:
    """Return the hyperparameters in an optimizer state by name, those of one optimizer among
    several as `g/learning_rate`. Several may have the same name, as those of two links of a chain.

    Args:
        opt_state: of a run of its own.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    numbers: dict[str, list[Array]] = {}
    for path, leaf in leaves:
        names = list_names(path)
        if names:
            numbers.setdefault(names[0], []).append(leaf)
    return numbers


def list_scheduled(opt_state: PyTree) -> set[str]:
    """Return the names of the hyperparameters that schedules compute, by all their names.

    Args:
        opt_state: of a run of its own, or of a population.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    return {name for path, _ in leaves for name in _list_scheduled(path)}


def list_names(path: Sequence[Any]) -> list[str]:
    """Return the names by which the hyperparameter at a path of an optimizer state may vary, the
    fullest first; none for another array."""
    is_inside = len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams"
    return _list_full_names(path[:-2], str(path[-1].key)) if is_inside else []


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
    for index, (key, next_key) in enumerate(itertools.pairwise(path)):
        if getattr(key, "name", None) == "hyperparams_states":
            return _list_full_names(path[:index], str(next_key.key))
    return []


def _list_full_names(path: Sequence[Any], name: str) -> list[str]:
    """Return a name with all, with some and with none of the names of optimizers that lead to it:
    `MultiOptimizer`, `optax.multi_transform` and `optax.named_chain` have their states by name.

    Args:
        path: to the state of `optax.inject_hyperparams`.
        name: of the hyperparameter.
    """
    keys = [getattr(entry, "key", None) for entry in path]
    optimizers = [key for key in keys if isinstance(key, str)]
    return [
        "/".join([*chosen, name])
        for size in range(len(optimizers), -1, -1)
        for chosen in itertools.combinations(optimizers, size)
    ]


def check_values(name: str, values: Any, num_members: int) -> None:
    """Raise a ConfigurationError if these are not numbers, or arrays, of each member.

    Args:
        name: what varies.
        values: its values.
        num_members: the number of members.
    """
    label = f"Population: vary[{name!r}]"
    is_list = isinstance(values, Sequence) or (eqx.is_array_like(values) and np.ndim(values) > 0)
    if isinstance(values, str) or not is_list:
        raise ConfigurationError(
            f"{label} is {values!r}; give a list with one value for each member"
        )
    if len(values) != num_members:
        raise ConfigurationError(
            f"{label} has {len(values)} values for {num_members} members: give one for each"
        )
    try:
        kind = np.asarray(values).dtype.kind
    except (TypeError, ValueError):  # arrays of several shapes
        kind = None
    # The kinds of bool, int, unsigned int, float and complex; bfloat16 is a `V` to NumPy.
    if kind is None or kind not in "biufcV":
        raise ConfigurationError(
            f"{label} is {values!r}; give numbers, or arrays of one shape. Anything else, such as "
            "a function, cannot be vmapped: use a sweep of several runs"
        )


def convert_values(name: str, values: Any, leaf: Array) -> Array:
    """Return what varies as the array that it replaces.

    Args:
        name: of what varies.
        values: of all members.
        leaf: the stacked array.

    Raises:
        ConfigurationError: it has another shape, or numbers that the array cannot hold, such as
            fractions where it has integers. Floating-point numbers are rounded.
    """
    exact = np.asarray(values)
    if exact.shape != leaf.shape:
        raise ConfigurationError(
            f"Population: vary[{name!r}] has the shape {exact.shape}, and what it replaces has, of "
            f"all members, {leaf.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        is_held = _is_held(exact, leaf.dtype)
    if not is_held:
        raise ConfigurationError(
            f"Population: vary[{name!r}] is {values!r}, which the array of {leaf.dtype} that it "
            f"replaces cannot hold: give numbers of {leaf.dtype}, or make the array one of floats"
        )
    return jnp.asarray(exact.astype(leaf.dtype))


def _is_held(values: np.ndarray, dtype: Any) -> bool:
    """Return whether numbers are the same in a dtype, but for rounding to floating-point ones."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    if np.iscomplexobj(values) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    converted = values.astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array_equal(np.isfinite(converted), np.isfinite(values))
    return np.array_equal(converted, values)
