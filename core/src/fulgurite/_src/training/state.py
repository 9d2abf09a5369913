"""The state of training, and who owns the arrays in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from fulgurite._src.plugins.plugin import Plugin
from fulgurite._src.training.initializer import TracedInitializer
from fulgurite._src.training.metric_window import MetricWindow
from fulgurite._src.training.nonfinite import NonFiniteTracker
from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import copy_arrays, is_array
from fulgurite.errors import ModelError, StateError, error_context


class TrainState(eqx.Module):
    """Everything that a training step reads and writes.

    One pytree, donated at every step, saved in every checkpoint.

    Example:
        state = engine.init_state(model, data)
        bias = jnp.zeros_like(state.module.linear.bias)
        module = eqx.tree_at(lambda module: module.linear.bias, state.module, bias)
        state = state.replace(module=module)

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

    # A property: Equinox flattens the owner of a method at each call, also where its model state is
    # used up and is just what is to be replaced.
    @property
    def replace(self) -> Callable[..., "TrainState"]:
        """Return a copy with some fields changed: `state.replace(module=module)`."""
        return partial(replace, self)

    # Likewise.
    @property
    def with_plugin_state(self) -> Callable[[Plugin | str, PyTree], "TrainState"]:
        """Return a copy with another plugin state: `state.with_plugin_state(plugin, value)`.

        The plugin is an `fg.Plugin`, or the registered name of any plugin that has a state;
        anything else is a `StateError`.
        """
        return partial(_replace_plugin_state, self)

    def reset_metrics(self) -> "TrainState":
        """Return a copy whose metrics start over: those of the open window, and running ones such
        as moving averages."""
        return self.replace(metric_window=jax.tree.map(jnp.zeros_like, self.metric_window))


def _replace_plugin_state(state: TrainState, plugin: Plugin | str, value: PyTree) -> TrainState:
    states = f"the state has those of: {', '.join(state.plugin_states) or 'no plugin'}"
    if not isinstance(plugin, Plugin | str):
        raise StateError(
            f"with_plugin_state takes an fg.Plugin or the registered name of a plugin, not "
            f"{plugin!r}; {states}"
        )
    name = plugin if isinstance(plugin, str) else plugin.registered_name
    if name not in state.plugin_states:
        raise StateError(f"with_plugin_state: plugin {name!r} has no plugin state; {states}")
    return state.replace(plugin_states={**state.plugin_states, name: value})


@dataclass(frozen=True)
class ModelInit:
    """Where a module and its state come from.

    Attributes:
        arrays: the arrays of `model`; None where the model is yet to be made.
        build: `build(arrays, key)`, traced, returns the module and its state.
        model: the module and its state; None where they are yet to be made.
    """

    arrays: PyTree
    build: Callable[[PyTree, Key[Array, ""]], tuple[Any, "eqx.nn.State | None"]]
    model: Any = None


def as_model_init(model: Any) -> ModelInit:
    """Return the initializer of a model.

    Args:
        model: a module; a pair of a module and an `eqx.nn.State`; or a callable, called as
            `model(key=key)`, that returns either. The arrays of a callable are made on the device;
            those of a module are copied.

    Raises:
        ModelError: `model` is none of these, or its module cannot be trained.
        StateError: the arrays of `model` were consumed by a step.
    """
    if isinstance(model, eqx.Module) or _is_pair(model):
        pair = _validate_model(model)
        check_not_consumed({"module": pair[0], "model_state": pair[1]})
        arrays, static = eqx.partition(pair, is_array)
        return ModelInit(arrays, lambda arrays, key: copy_arrays(eqx.combine(arrays, static)), pair)
    if not callable(model):
        raise ModelError(
            "a model is an Equinox module, (module, eqx.nn.State), or a callable that gives "
            f"either, called with key=; {type(model).__name__} is not one of these"
        )

    make_model = TracedInitializer(lambda key: _validate_model(model(key=key)))

    def build(_: PyTree, key: Key[Array, ""]) -> tuple[Any, eqx.nn.State | None]:
        name = getattr(model, "__name__", "model")
        with error_context(lambda: f"while the model was made, as {name}(key=key)"):
            return copy_arrays(make_model(key))

    return ModelInit(None, build)


def check_aliases(module: PyTree) -> None:
    """Raise a ModelError that names both paths if one array is at two of them.

    It would be donated twice, and updated as two parameters.
    """
    index_by_id: dict[int, int] = {}
    for index, leaf in enumerate(jax.tree.leaves(module)):
        if not is_array(leaf):
            continue
        first_index = index_by_id.setdefault(id(leaf), index)
        if first_index != index:
            paths = [path for path, _ in leaves_with_paths(module)]
            raise ModelError(
                f"{paths[first_index]} and {paths[index]} of {type(module).__name__} are the same "
                "array: copy one of them, or tie them with eqx.nn.Shared"
            )


def check_has_state(module: PyTree, model_state: Any) -> None:
    """Raise a ModelError if a module has layers that keep state and comes without a state.

    Args:
        module: the model.
        model_state: its `eqx.nn.State`, or None.
    """
    if model_state is not None:
        return
    leaves = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex))
    if any(isinstance(leaf, eqx.nn.StateIndex) for leaf in leaves):
        name = type(module).__name__
        raise ModelError(
            f"{name} has layers that keep state, such as BatchNorm, but no state was given: give "
            f"eqx.nn.make_with_state({name}), which makes both, or the pair (module, state)"
        )


def check_not_consumed(state: PyTree) -> None:
    """Raise a StateError if an array of a state or model was donated to a later step."""
    for index, leaf in enumerate(jax.tree.leaves(state)):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            path, _ = leaves_with_paths(state)[index]
            kind = "train state" if isinstance(state, TrainState) else "model"
            raise StateError(
                f"this {kind} was consumed: its {path} belongs to a later step now. `step` and "
                "`fit` consume the state they are given, module included; continue with the one "
                "they return"
            )


def _validate_model(model: Any) -> tuple[Any, eqx.nn.State | None]:
    """Return the module and its state after checking them."""
    module, model_state = model if _is_pair(model) else (model, None)
    check_has_state(module, model_state)
    check_aliases(module)
    return module, model_state


def _is_pair(model: Any) -> bool:
    return (
        isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State | None)
    )
