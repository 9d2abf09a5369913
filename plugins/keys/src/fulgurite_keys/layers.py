"""Outputs of the layers inside a model, without a change to the model.

A layer whose output is asked for is wrapped, so that it sows what it returns under its path. All
other layers are left alone.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import equinox as eqx
import jax
from fulgurite.errors import ModelError, PathError
from fulgurite.plugins import (
    TreePath,
    is_layer,
    path_from_keys,
    replace_layers,
    wrap_layer,
)

from fulgurite_keys.paths import (
    Index,
    Name,
    Part,
    format_parts,
    has_wildcard,
    matches,
    parse,
    resolve,
)
from fulgurite_keys.scope import KeyPath
from fulgurite_keys.sowing import Sown, collect_sown, sow

CALLS = Name("__call__")
"""What tells the layer and its calls apart in a key, as in Kauldron: `encoder.__call__[0]`."""
PREFIX = (Name("interms"),)

LayerPath = tuple[Part, ...]


class LayerOutputs:
    """What keys that begin with `interms` find in a forward pass.

    Args:
        module: the model.
        keys: all such keys.
    """

    def __init__(self, module: Any, keys: Iterable[KeyPath]) -> None:
        self._layers = find_layers(module)
        self._sown = Sown()
        self._heads: dict[KeyPath, list[LayerPath]] = {key: list_heads(key) for key in keys}
        self._tapped = {
            layer for heads in self._heads.values() for layer in self._choose_layers(heads)
        }

    def run(self, call: Callable[[Any, Any], Any], module: Any, batch: Any) -> Any:
        """Return what `call(module, batch)` returns, and keep what its layers compute."""
        with collect_sown(self._should_collect) as self._sown:
            return call(tap_layers(module, self._tapped), batch)

    def resolve(self, key: KeyPath) -> Any:
        """Return what a key finds.

        Raises:
            PathError: no such layer was called, and nothing was sown by that name.
            ModelError: the layer was called several times, and the key does not say which is meant.
        """
        for head in self._heads[key]:
            rest = key.parts[len(head) :]
            outputs = {
                name: calls
                for name, calls in self._sown.values.items()
                if matches(head, parse_sown_name(name))
            }
            if has_wildcard(head) and outputs:
                return {name: _choose_call(name, calls, rest) for name, calls in outputs.items()}
            for name, calls in outputs.items():
                try:
                    return _choose_call(name, calls, rest)
                except PathError as error:
                    raise PathError(f"{error}. {self._list_names(key)}") from error
        raise self._make_error(key)

    def _should_collect(self, name: str) -> bool:
        path = parse_sown_name(name)
        return any(matches(head, path) for heads in self._heads.values() for head in heads)

    def _choose_layers(self, heads: list[LayerPath]) -> list[LayerPath]:
        """Return the layers that the longest beginning of a key stands for."""
        for head in heads:
            layers = [layer for layer in self._layers if matches(head, layer)]
            if layers:
                return layers
        return []

    def _make_error(self, key: KeyPath) -> PathError:
        uncalled = self._choose_layers(self._heads[key])
        if uncalled:
            return PathError(
                f"the layer {format_parts(uncalled[0])} was not called in this step, for the key "
                f"{str(key)!r}: only what its __call__ returns can be found"
            )
        return PathError(
            f"no layer or sown value for the key {str(key)!r}. {self._list_names(key)}"
        )

    def _list_names(self, key: KeyPath) -> str:
        """Return the layers and sown names there are, as the end of a message."""
        names = sorted({format_parts(layer) for layer in self._layers} | self._sown.names)
        close = get_close_matches(format_parts(key.parts), names, n=1)
        hint = f"Did you mean 'interms.{close[0]}'? " if close else ""
        return f"{hint}Layers and sown names: {', '.join(names) or 'none'}"


def find_layers(module: Any) -> list[LayerPath]:
    """Return the paths of all modules below a model that can be called."""
    layers: list[LayerPath] = []

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        children, _ = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda other: other is not node
        )
        if path and is_layer(node):
            layers.append(_as_parts(path_from_keys(path)))
        for keys, child in children:
            if keys:
                visit(child, path + keys)

    visit(module, ())
    return layers


def tap_layers(module: Any, layers: Iterable[LayerPath]) -> Any:
    """Return the model with layers that sow their outputs.

    Args:
        module: the model.
        layers: the paths of the layers.
    """
    wanted = set(layers)
    if not wanted:
        return module

    def tap(layer: Any, path: TreePath) -> Any:
        parts = _as_parts(path)
        # One that another plugin asks for, too, sows once, and both get what is sown.
        return wrap_layer(layer, _sow_output, format_parts(parts)) if parts in wanted else layer

    return replace_layers(module, tap)


def list_heads(key: KeyPath) -> list[LayerPath]:
    """Return the beginnings of a key that may name a layer, the longest first."""
    if CALLS in key.parts:
        return [key.parts[: key.parts.index(CALLS)]]
    return [key.parts[:length] for length in range(len(key.parts), 0, -1)]


def parse_sown_name(name: str) -> LayerPath:
    """Return the path that a name is, or the name as the only part of one."""
    try:
        return parse(name)
    except PathError:
        return (Name(name),)


def _choose_call(name: str, calls: list[Any], rest: LayerPath) -> Any:
    """Return what the rest of a key finds in the output of a layer."""
    place = (*PREFIX, *parse_sown_name(name))
    if rest and rest[0] == CALLS:
        return resolve(tuple(calls), rest[1:], (*place, CALLS))
    if len(calls) > 1:
        raise ModelError(
            f"interms.{name} was computed {len(calls)} times in one step: choose with "
            f"interms.{name}.__call__[0] to interms.{name}.__call__[{len(calls) - 1}], or take all "
            f"with interms.{name}.__call__"
        )
    return resolve(calls[0], rest, place)


def _sow_output(name: str, call: Callable[[], Any]) -> Any:
    return _sow_arrays(name, call())


def _sow_arrays(name: str, output: Any) -> Any:
    """Sow the output of a layer, without the `eqx.nn.State` that may come with it."""
    if not isinstance(output, tuple) or not any(map(_is_state, output)):
        return sow(name, output)
    values = tuple(value for value in output if not _is_state(value))
    shown = sow(name, values[0] if len(values) == 1 else values)
    remaining = iter((shown,) if len(values) == 1 else shown)
    return tuple(value if _is_state(value) else next(remaining) for value in output)


def _is_state(value: Any) -> bool:
    return isinstance(value, eqx.nn.State)


def _as_parts(path: TreePath) -> LayerPath:
    return tuple(
        Name(segment) if isinstance(segment, str) else Index((segment,)) for segment in path
    )
