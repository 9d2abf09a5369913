"""The statistics of batch normalization, from a pass over data."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.plugins import count_examples
from jaxtyping import Array, Bool, Float

from fulgurite_averaging.padding import leave_out_padding


class _Moments(fg.metrics.Metric):
    """Mean and variance of the inputs of a layer, by channel.

    Moments about zero are not added up: the difference of two large ones has few digits.
    Source: the pairwise update of Chan, Golub and LeVeque, Algorithms for Computing the Sample
    Variance (1983).

    Attributes:
        weight: float32, the number of examples; 0 if training does not update the layer.
        mean: float32 `(channels,)`.
        variance: float32 `(channels,)`.
    """

    weight: Float[Array, ""]
    mean: Float[Array, " channels"]
    variance: Float[Array, " channels"]

    @staticmethod
    def from_batch(
        weight: Array, mean: Float[Array, " channels"], variance: Float[Array, " channels"]
    ) -> "_Moments":
        """Return the moments of a batch, in float32 at least."""
        dtype = jnp.promote_types(mean.dtype, jnp.float32)
        # Of a layer that was not updated they may be anything.
        mean = jnp.where(weight == 0, 0, mean.astype(dtype))
        variance = jnp.where(weight == 0, 0, variance.astype(dtype))
        return _Moments(weight.astype(jnp.float32), mean, variance)

    def merge(self, other: Any) -> Any:
        weight = self.weight + other.weight
        share = other.weight / jnp.where(weight == 0, 1, weight)
        delta = other.mean - self.mean
        variance = self.variance + share * (other.variance - self.variance)
        return _Moments(
            weight, self.mean + share * delta, variance + share * (1 - share) * delta**2
        )

    def empty(self) -> Self:
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> dict[str, Any]:
        return {"weight": self.weight, "mean": self.mean, "variance": self.variance}


class _Collector(fg.Module):
    """Runs a module as in training and measures what its batch normalization sees.

    Attributes:
        module: the module.
        inference_flags: of its layers, before the evaluation sets all of them: what is in inference
            mode, such as a pretrained part, is so in training too.
    """

    module: Any
    inference_flags: tuple[Any, ...] = eqx.field(static=True)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the moments of each layer."""
        module = eqx.tree_at(_list_inference_flags, self.module, self.inference_flags)
        layers = _list_layers(module)
        assert ctx.model_state is not None
        before = _prepare_state(ctx.model_state, layers)
        # A copy: a layer that sets an entry makes the state unusable.
        ctx = replace(ctx, model_state=jax.tree.map(lambda leaf: leaf, before))
        with fg.training_mode(True):
            module = jax.tree.map(_without_momentum, module, is_leaf=_is_batch_norm)
            if ctx.mask is not None:
                module = leave_out_padding(module, ctx.mask)
            output = module.training_step(batch, ctx)
        num_examples = count_examples(batch, ctx)
        moments = {}
        for number, layer in enumerate(layers):
            mean, variance = output.model_state.get(_get_index(layer))
            is_updated = _is_updated(before, output.model_state, layer)
            weight = jnp.where(is_updated, num_examples, 0)
            moments[f"{number}"] = _Moments.from_batch(weight, mean, variance)
        return fg.Output(metrics=moments)


def recompute_statistics(
    engine: fg.Engine, model: Any, data: Any, *, num_batches: int | None = None
) -> Any:
    """Return a model whose batch normalization has the exact statistics of data.

    A running average is of the weights of earlier steps, and that of averaged weights belongs to no
    model at all. This runs the model over the data once, as in training, and sets mean and variance
    of every `eqx.nn.BatchNorm` to those over all examples; with several such layers, each sees the
    outputs of those before it as in training, normalized by batch. Rows that are masked as padding
    are left out. Layers in inference mode, such as those of a teacher, run so here too, and the
    statistics of what training does not update stay as they are: of what `training_step` leaves
    alone, and of what a plugin of the engine always keeps from training, as `Freeze` does. A part
    that is frozen at some steps only is recomputed.

    Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2.

    Args:
        engine: the engine that evaluates.
        model: a result, a train state, or a pair of a module and its state.
        data: what the model was trained on.
        num_batches: use at most this many batches.

    Returns:
        A train state if `model` is a result or a train state, else a pair. The arrays of `model`
        stay usable.

    Raises:
        ModelError: the model has no batch normalization, or training updates none of it; or a
            batch has padding, and a layer normalizes over other axes than that of the examples.
    """
    state = model.state if isinstance(model, fg.FitResult) else model
    if isinstance(state, fg.TrainState):
        module, model_state = state.module, state.model_state
    else:
        module, model_state = state
    layers = _list_layers(module)
    if not layers or model_state is None:
        raise ModelError(
            f"{type(module).__name__} has no eqx.nn.BatchNorm, so there are no statistics to "
            "recompute"
        )
    collector = _Collector(module, tuple(_list_inference_flags(module)))
    metrics = engine.evaluate(
        (collector, model_state), data, name="statistics", num_batches=num_batches
    )
    # A copy: setting an entry makes the old state unusable.
    model_state = jax.tree.map(jnp.copy, model_state)
    for number in _list_updated_layers(engine, module, metrics):
        mean, variance = (jnp.asarray(metrics[f"{number}/{name}"]) for name in ("mean", "variance"))
        model_state = _set_statistics(model_state, layers[number], mean, variance)
    if isinstance(state, fg.TrainState):
        return state.replace(model_state=model_state)
    return module, model_state


def list_scales(module: Any, model_state: Any) -> tuple[Array, ...]:
    """Return how much the running statistics of each layer hold so far, from 0 to 1.

    Those of an `eqx.nn.BatchNorm` of mode `batch` begin at zero, and the layer divides them by this
    number, which grows with its updates. An average of statistics is to be divided by the average
    of these numbers.

    Args:
        module: the module.
        model_state: its state; None without any.
    """
    if model_state is None:
        return ()
    counts = [model_state.get(layer.batch_counter) for layer in _list_scaled_layers(module)]
    momentums = [layer.momentum for layer in _list_scaled_layers(module)]
    return tuple(
        1 - jnp.float32(momentum) ** count.astype(jnp.float32)
        for momentum, count in zip(momentums, counts, strict=True)
    )


def set_scales(module: Any, model_state: Any, scales: tuple[Array, ...]) -> Any:
    """Return a model state of averaged statistics as layers read it: with the scales of the numbers
    of updates that it holds.

    Args:
        module: the module.
        model_state: with averages of statistics; it stays usable.
        scales: the averages of what `list_scales` returned.
    """
    layers = _list_scaled_layers(module)
    # A copy: setting an entry makes the old state unusable.
    model_state = jax.tree.map(lambda leaf: leaf, model_state)
    new_scales = list_scales(module, model_state)
    for layer, scale, new_scale in zip(layers, scales, new_scales, strict=True):
        # Before the first update there is nothing to divide.
        factor = jnp.where(scale == 0, 1, new_scale / jnp.where(scale == 0, 1, scale))
        index = _get_index(layer)
        mean, variance = (
            # Of a stack of layers each has a scale of its own.
            (leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))).astype(
                leaf.dtype
            )
            for leaf in model_state.get(index)
        )
        model_state = model_state.set(index, (mean, variance))
    return model_state


def _list_scaled_layers(module: Any) -> list[eqx.nn.BatchNorm]:
    return [layer for layer in _list_layers(module) if layer.mode == "batch"]


def _list_updated_layers(engine: fg.Engine, module: Any, metrics: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers whose statistics training updates; none is a ModelError.

    Args:
        engine: whose plugins may keep some from training.
        module: the module.
        metrics: the moments that were measured.
    """
    frozen_markers = _list_frozen_markers(engine, module)
    used = [
        number
        for number, layer in enumerate(_list_layers(module))
        if metrics[f"{number}/weight"] > 0 and _get_index(layer).marker not in frozen_markers
    ]
    if not used:
        raise ModelError(
            f"training_step of {type(module).__name__} updates the statistics of no "
            "eqx.nn.BatchNorm, so there are none to recompute: take those to be recomputed out of "
            "inference mode, eqx.nn.inference_mode(layer, value=False), and out of Freeze"
        )
    return used


def _list_frozen_markers(engine: fg.Engine, module: Any) -> list[object]:
    """Return what tells apart the indices of the model state that plugins keep from training.

    Args:
        engine: whose plugins are asked.
        module: the module.
    """
    hook = engine.plugins.hooks.get("list_kept_state")
    if hook is None:
        return []
    answers = hook.each(module=module)
    return [index.marker for _, indices in answers for index in indices or ()]


def _set_statistics(
    model_state: eqx.nn.State, layer: eqx.nn.BatchNorm, mean: Array, variance: Array
) -> eqx.nn.State:
    """Return a model state in which a layer has these statistics."""
    index = _get_index(layer)
    old_mean, old_variance = model_state.get(index)
    if layer.mode == "ema":
        assert layer.ema_first_time_index is not None
        model_state = model_state.set(layer.ema_first_time_index, jnp.array(False))
    else:
        scale = _get_scale(model_state, layer)
        mean, variance = mean * scale, variance * scale
    return model_state.set(
        index, (mean.astype(old_mean.dtype), variance.astype(old_variance.dtype))
    )


def _is_batch_norm(node: Any) -> bool:
    return isinstance(node, eqx.nn.BatchNorm)


def _list_layers(module: Any) -> list[eqx.nn.BatchNorm]:
    nodes = jax.tree.leaves(module, is_leaf=_is_batch_norm)
    return [node for node in nodes if _is_batch_norm(node)]


def _get_index(layer: eqx.nn.BatchNorm) -> eqx.nn.StateIndex:
    index = layer.ema_state_index if layer.mode == "ema" else layer.batch_state_index
    assert index is not None
    return index


def _list_inference_flags(module: Any) -> list[Any]:
    """Return the flags that `eqx.nn.inference_mode` sets, in its order."""
    nodes = jax.tree.leaves(module, is_leaf=_has_inference_flag)
    return [node.inference for node in nodes if _has_inference_flag(node)]


def _has_inference_flag(node: Any) -> bool:
    return hasattr(node, "inference")


def _prepare_state(model_state: eqx.nn.State, layers: list[eqx.nn.BatchNorm]) -> eqx.nn.State:
    """Return the model state for layers without momentum: those in inference mode normalize as
    before, and `_is_updated` tells which ones are not.

    Args:
        model_state: the state, which stays usable.
        layers: with their momentum.
    """
    model_state = jax.tree.map(lambda leaf: leaf, model_state)
    for layer in layers:
        if layer.mode == "ema":
            assert layer.ema_first_time_index is not None
            model_state = model_state.set(layer.ema_first_time_index, jnp.array(True))
        else:
            index = _get_index(layer)
            scale = _get_scale(model_state, layer)
            mean, variance = model_state.get(index)
            model_state = model_state.set(index, (mean / scale, variance / scale))
    return model_state


def _is_updated(
    before: eqx.nn.State, after: eqx.nn.State, layer: eqx.nn.BatchNorm
) -> Bool[Array, ""]:
    """Return whether a layer has updated its statistics.

    Args:
        before: the state from `_prepare_state`.
        after: the state of the output.
        layer: the layer.
    """
    if layer.mode == "ema":
        assert layer.ema_first_time_index is not None
        return ~after.get(layer.ema_first_time_index)
    assert layer.batch_counter is not None
    return after.get(layer.batch_counter) > before.get(layer.batch_counter)


def _get_scale(model_state: eqx.nn.State, layer: eqx.nn.BatchNorm) -> Array:
    """Return what a layer of mode `batch` divides its running average by, which begins at zero."""
    assert layer.batch_counter is not None
    count = model_state.get(layer.batch_counter)
    return jnp.where(count == 0, 1, 1 - jnp.float32(layer.momentum) ** count.astype(jnp.float32))


def _without_momentum(node: Any) -> Any:
    """Return a layer that keeps the statistics of the last batch alone; other nodes unchanged."""
    if not _is_batch_norm(node):
        return node
    layer = copy.copy(node)
    object.__setattr__(layer, "momentum", 0.0)
    return layer
