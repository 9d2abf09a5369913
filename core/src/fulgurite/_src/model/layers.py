"""Layers inside a model that do something around their call, without a change to the model.

A layer is replaced by an instance of a subclass of its class, made on the fly. `isinstance` and
attributes stay as they are, and so does the structure of the model but for these classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from fulgurite._src.tree.paths import TreePath, path_from_keys

AroundCall = Callable[[str, Callable[[], Any]], Any]
"""`around(name, call)` calls `call()` and returns what the layer is to return."""


def is_layer(node: Any) -> bool:
    """Return whether a node is a module that can be called.

    `callable` would not do: the metaclass of `equinox.Module` makes everything callable.
    """
    return isinstance(node, eqx.Module) and any(
        "__call__" in base.__dict__ for base in type(node).__mro__
    )


def replace_layers(module: Any, replace: Callable[[Any, TreePath], Any]) -> Any:
    """Return a model with other layers; the model itself stays as it is.

    Args:
        module: the model, which is not replaced itself.
        replace: called with each layer below it and its path, the innermost layers first; returns
            what takes its place.
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
        return replace(rebuilt, path_from_keys(path)) if path and is_layer(node) else rebuilt

    return rebuild(module, ())


def wrap_layer(layer: Any, around: AroundCall, name: str) -> Any:
    """Return a layer that is called within a function; one that is so already stays.

    Args:
        layer: the layer.
        around: a function of a module, which gets the name and the call of the layer.
        name: a static field of the layer that is returned, so that it survives `jax.vmap`, `scan`
            and `jax.checkpoint`.
    """
    field = _get_field(around)
    if hasattr(layer, field):
        return layer
    wrapped = object.__new__(_make_wrapped_class(type(layer), around))
    for layer_field in dataclasses.fields(type(layer)):
        if hasattr(layer, layer_field.name):
            object.__setattr__(wrapped, layer_field.name, getattr(layer, layer_field.name))
    object.__setattr__(wrapped, field, name)
    return wrapped


def _get_field(around: AroundCall) -> str:
    """Return the field of a name, of which a layer that is wrapped twice has two."""
    return f"_{around.__module__}.{around.__qualname__}".replace(".", "_")


@functools.lru_cache(256)
def _make_wrapped_class(layer_class: Any, around: AroundCall) -> Any:
    call = layer_class.__call__
    field = _get_field(around)

    @functools.wraps(call)  # some look which arguments a layer takes
    def call_within(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(getattr(self, field), lambda: call(self, *args, **kwargs))

    namespace = {
        "__annotations__": {field: str},
        "__call__": call_within,
        "__doc__": layer_class.__doc__,
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        field: eqx.field(static=True, default=""),
    }
    return type(layer_class)(layer_class.__name__, (layer_class,), namespace)
