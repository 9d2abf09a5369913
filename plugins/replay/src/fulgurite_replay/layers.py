"""Layers that tell operations their paths in the model, by the name stack of JAX.

A layer is replaced by an instance of a subclass of its class, made on the fly, as `fulgurite-keys`
does it. Names change no number.
"""

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite.plugins import Forward, path_from_keys

_START = "layer:"
_SCOPE = re.compile(r"layer:([^/()]+)")


class NamedLayers(fg.UpdateRuleWrapper):
    """Makes an update with a model whose layers name their operations.

    Example:
        from fulgurite_replay.layers import NamedLayers

        rule = NamedLayers(fg.GradientUpdate(optax.sgd(0.1)))
    """

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        def forward_named(module: Any, *args: Any, **kwargs: Any) -> fg.Output:
            return forward(name_layers(module), *args, **kwargs)

        return self.update_rule(forward_named, state, batch, ctx)


def find_layer(scope: str) -> str | None:
    """Return the path of the innermost layer in a name stack; None outside of all."""
    names = _SCOPE.findall(scope)
    return names[-1] if names else None


def name_layers(module: Any) -> Any:
    """Return a model each of whose layers names what it computes; the model itself stays.

    Args:
        module: the model.
    """

    def rebuild(node: Any, path: tuple[Any, ...]) -> Any:
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda other: other is not node
        )
        if not any(keys for keys, _ in children):
            return node
        rebuilt = jax.tree.unflatten(
            structure, [rebuild(child, path + keys) for keys, child in children]
        )
        return _name(rebuilt, str(path_from_keys(path))) if path and _is_layer(node) else rebuilt

    return rebuild(module, ())


def _is_layer(node: Any) -> bool:
    # `callable` would not do: the metaclass of `equinox.Module` makes everything callable.
    return isinstance(node, eqx.Module) and any(
        "__call__" in base.__dict__ for base in type(node).__mro__
    )


def _name(layer: Any, path: str) -> Any:
    """Return a layer as an instance of a subclass whose operations are named."""
    named = object.__new__(_make_named_class(type(layer)))
    for field in dataclasses.fields(type(layer)):
        if hasattr(layer, field.name):
            object.__setattr__(named, field.name, getattr(layer, field.name))
    object.__setattr__(named, "_layer_path", path)
    return named


@functools.lru_cache(256)
def _make_named_class(layer_class: Any) -> Any:
    call = layer_class.__call__

    @functools.wraps(call)  # some look which arguments a layer takes
    def call_named(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_START + self._layer_path):
            return call(self, *args, **kwargs)

    namespace = {
        "__annotations__": {"_layer_path": str},
        "__call__": call_named,
        "__doc__": layer_class.__doc__,
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        "_layer_path": eqx.field(static=True, default=""),
    }
    return type(layer_class)(layer_class.__name__, (layer_class,), namespace)
