"""What is done to a whole model: adapters are added, chosen, merged and removed."""

import zlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, check_name, did_you_mean
from fulgurite.plugins import path_from_keys
from jaxtyping import Key, PyTree

from fulgurite_lora.layers import Adapter, LoraLinear, get_fields

Where = fg.Selector | str | Callable[[Any], Any]
"""What `fg.select` takes, or a selection by it."""
_MAX_PATHS = 6


def add_adapters(
    module: PyTree,
    where: Where = "**",
    *,
    rank: int = 8,
    scale: float = 1.0,
    dropout: float = 0.0,
    axis_name: str | None = None,
    name: str = "default",
    key: Key[jax.Array, ""],
) -> PyTree:
    """Return a model whose selected linear layers have an adapter; it computes what it did before.

    A layer that has one of this name keeps its arrays, and gets this scale and dropout.

    Example:
        from fulgurite_lora import add_adapters

        mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        mlp = add_adapters(mlp, "layers[0]", rank=2, key=jax.random.key(1))

    Args:
        module: the model.
        where: the layers, `eqx.nn.Linear`, by their paths, as `fg.select` takes them; those of an
            attention layer are found by its path.
        rank: of each adapter; one above the smaller side of a layer gains nothing there.
        scale: a factor for what the adapters compute; alpha / rank in the paper.
        dropout: the probability with which an element of what goes into an adapter becomes 0.
        axis_name: of the `vmap` over examples, each of which then has dropout of its own.
        name: of the adapter; a model may have several.
        key: a random key; the adapter of each layer depends on its path alone.

    Raises:
        ConfigurationError: no linear layer is selected, or the adapter is there with another rank.
    """
    check_name(name, "add_adapters: name")
    is_selected = jax.tree.leaves(as_selector(where)(module), is_leaf=is_linear)
    nodes, structure = jax.tree_util.tree_flatten_with_path(module, is_leaf=is_linear)
    leaves = []
    num_adapters = 0
    for (path, node), flags in zip(nodes, is_selected, strict=True):
        if is_linear(node) and flags.weight:
            num_adapters += 1
            text = str(path_from_keys(path))
            adapter = Adapter.init(
                node.weight,
                rank,
                scale=scale,
                dropout=dropout,
                axis_name=axis_name,
                key=jax.random.fold_in(key, zlib.crc32(text.encode())),
            )
            node = _add_adapter(node, name, adapter, text)
        leaves.append(node)
    if not num_adapters:
        paths = [str(path_from_keys(path)) for path, node in nodes if is_linear(node)]
        raise _make_selection_error(where, paths)
    return jax.tree.unflatten(structure, leaves)


def use_adapters(module: PyTree, *names: str) -> PyTree:
    """Return a model in which the adapters of these names take part, and no others; without a name,
    the model as it was before it had any.

    Args:
        module: the model.
        names: of adapters.
    """
    check_names(module, names)

    def use(layer: LoraLinear) -> LoraLinear:
        _check_not_merged(layer)
        return layer.replace(active=tuple(name for name in names if name in layer.adapters))

    return _map_layers(use, module)


def merge(module: PyTree, *names: str) -> PyTree:
    """Return a model whose weights contain adapters, so that they cost nothing more. The adapters
    stay there for `unmerge`.

    Args:
        module: the model.
        names: of adapters; by default those that take part.
    """
    check_names(module, names)

    def merge_layer(layer: LoraLinear) -> LoraLinear:
        chosen = [name for name in names or layer.active if name in layer.adapters]
        new = [name for name in chosen if name not in layer.merged]
        weight = layer.weight
        for name in new:
            weight = weight + layer.adapters[name].change
        return layer.replace(weight=weight, merged=(*layer.merged, *new))

    return _map_layers(merge_layer, module)


def unmerge(module: PyTree) -> PyTree:
    """Return a model whose weights do not contain adapters any more, up to rounding."""

    def unmerge_layer(layer: LoraLinear) -> LoraLinear:
        weight = layer.weight
        for name in reversed(layer.merged):
            weight = weight - layer.adapters[name].change
        return layer.replace(weight=weight, merged=())

    return _map_layers(unmerge_layer, module)


def remove_adapters(module: PyTree, *names: str) -> PyTree:
    """Return a model without adapters; what is merged stays in the weights. A layer without any is
    an `eqx.nn.Linear` again.

    Args:
        module: the model.
        names: of adapters; all by default.
    """
    check_names(module, names)

    def remove(layer: LoraLinear) -> eqx.nn.Linear:
        rest = {key: value for key, value in layer.adapters.items() if names and key not in names}
        if not rest:
            return layer.drop_adapters()
        return layer.replace(
            adapters=rest,
            active=tuple(name for name in layer.active if name in rest),
            merged=tuple(name for name in layer.merged if name in rest),
        )

    return _map_layers(remove, module)


def select_adapters(name: str | None = None) -> Callable[[PyTree], Any]:
    """Return a function for `fg.select` that selects the arrays of adapters.

    Example:
        from fulgurite_checkpoint import Checkpointer
        from fulgurite_lora import Lora, select_adapters

        checkpointer = Checkpointer(every=100, weights_only=fg.select(select_adapters()))
        engine = fg.Engine(steps=100, run_dir="runs/lora", plugins=[Lora(rank=2), checkpointer])

    Args:
        name: of the adapters; None for all.
    """

    def list_adapters(module: PyTree) -> tuple[Adapter, ...]:
        return tuple(
            adapter
            for layer in list_layers(module)
            for key, adapter in layer.adapters.items()
            if name in (None, key)
        )

    return list_adapters


def list_scales(module: PyTree) -> tuple[Any, ...]:
    """Return the scales of all adapters of a model."""
    return tuple(
        adapter.scale for layer in list_layers(module) for adapter in layer.adapters.values()
    )


def as_selector(where: Where) -> fg.Selector:
    """Return the selection that a pattern, a function or a selection is.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(where, fg.Selector):
        return where
    if not isinstance(where, str) and not callable(where):
        raise ConfigurationError(
            f"layers are selected by a pattern such as 'head', a function of the module, or "
            f"fg.select('head', 'body'), not by {where!r}"
        )
    return fg.select(where)


def list_layers(module: PyTree) -> list[LoraLinear]:
    """Return the layers of a model that have adapters."""
    nodes = jax.tree.leaves(module, is_leaf=is_linear)
    return [node for node in nodes if isinstance(node, LoraLinear)]


def is_linear(node: Any) -> bool:
    """Return whether a node is a linear layer that may have adapters; a subclass of one's own may
    compute anything."""
    return type(node) in (eqx.nn.Linear, LoraLinear)


def check_names(module: PyTree, names: tuple[str, ...]) -> None:
    """Raise a ConfigurationError for the name of an adapter that no layer has.

    Args:
        module: the model.
        names: of adapters.
    """
    known = {name for layer in list_layers(module) for name in layer.adapters}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"no layer has an adapter called {name!r}. {did_you_mean(name, known)}"
            )


def _make_selection_error(where: Where, paths: list[str]) -> ConfigurationError:
    """Return the error that no linear layer is selected.

    Args:
        where: what should select some.
        paths: of all linear layers.
    """
    more = ", ..." if len(paths) > _MAX_PATHS else ""
    return ConfigurationError(
        f"{where!r} selects no eqx.nn.Linear, and adapters are for these; there are "
        f"{', '.join(paths[:_MAX_PATHS]) or 'none'}{more}"
    )


def _add_adapter(layer: eqx.nn.Linear, name: str, adapter: Adapter, path: str) -> LoraLinear:
    if not isinstance(layer, LoraLinear):
        layer = LoraLinear(**get_fields(layer), adapters={}, active=(), merged=())
    _check_not_merged(layer)
    before = layer.adapters.get(name)
    if before is not None:
        if before.down.shape != adapter.down.shape:
            raise ConfigurationError(
                f"the adapter {name!r} of {path} has the rank {before.down.shape[-2]}, not "
                f"{adapter.down.shape[-2]}: give that rank, or the new adapter another name"
            )
        arrays = (before.down, before.up)
        adapter = eqx.tree_at(lambda adapter: (adapter.down, adapter.up), adapter, arrays)
    active = layer.active if name in layer.active else (*layer.active, name)
    return layer.replace(adapters={**layer.adapters, name: adapter}, active=active)


def _check_not_merged(layer: LoraLinear) -> None:
    if layer.merged:
        raise ConfigurationError(
            f"the adapters {', '.join(layer.merged)} are merged into the weights: unmerge the "
            "model first, or remove them"
        )


def _map_layers(function: Callable[[LoraLinear], Any], module: PyTree) -> PyTree:
    if not list_layers(module):
        raise ConfigurationError(f"{type(module).__name__} has no adapters: add some first")
    return jax.tree.map(
        lambda node: function(node) if isinstance(node, LoraLinear) else node,
        module,
        is_leaf=is_linear,
    )
