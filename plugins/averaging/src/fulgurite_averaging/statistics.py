"""The statistics of batch normalization, from a pass over data."""

import copy
from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.training.forward import count_examples
from jaxtyping import Array, Float


class _Moments(fg.metrics.Metric):
    """The first two moments of the inputs of a layer, by channel.

    Attributes:
        weight: float32, the number of examples.
        first: float32 `(channels,)`, the sum of the means of batches.
        second: float32 `(channels,)`, the sum of their second moments.
    """

    weight: Float[Array, ""]
    first: Float[Array, " channels"]
    second: Float[Array, " channels"]

    def merge(self, other: Any) -> Any:
        return jax.tree.map(jnp.add, self, other)

    def empty(self) -> Self:
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> dict[str, Any]:
        mean = self.first / self.weight
        return {"mean": mean, "variance": self.second / self.weight - mean**2}


class _Collector(fg.Module):
    """Runs a module as in training and measures what its batch normalization sees."""

    module: Any

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the moments of each layer."""
        with fg.training_mode(True, self.module) as module:
            module = jax.tree.map(_without_momentum, module, is_leaf=_is_batch_norm)
            output = module.training_step(batch, ctx)
        weight = count_examples(batch, ctx)
        moments = {}
        for number, layer in enumerate(_list_layers(module)):
            mean, variance = output.model_state.get(_get_index(layer))
            second = variance + mean**2
            moments[f"{number}"] = _Moments(weight, weight * mean, weight * second)
        return fg.Output(metrics=moments)


def recompute_statistics(
    engine: fg.Engine, model: Any, data: Any, *, num_batches: int | None = None
) -> Any:
    """Return a model whose batch normalization has the exact statistics of data.

    A running average is of the weights of earlier steps, and that of averaged weights belongs to no
    model at all. This runs the model over the data once, as in training, and sets mean and variance
    of every `eqx.nn.BatchNorm` to those over all examples; with several such layers, each sees the
    outputs of those before it as in training, normalized by batch.

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
        ModelError: the model has no batch normalization.
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
    metrics = engine.evaluate(
        (_Collector(module), model_state), data, name="statistics", num_batches=num_batches
    )
    # A copy: setting an entry makes the old state unusable.
    model_state = jax.tree.map(jnp.copy, model_state)
    for number, layer in enumerate(layers):
        model_state = _set_statistics(
            model_state,
            layer,
            jnp.asarray(metrics[f"{number}/mean"]),
            jnp.asarray(metrics[f"{number}/variance"]),
        )
    if isinstance(state, fg.TrainState):
        return state.replace(model_state=model_state)
    return module, model_state


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
        # The layer divides by this, because its running average begins at zero.
        assert layer.batch_counter is not None
        count = model_state.get(layer.batch_counter)
        scale = jnp.where(count == 0, 1, 1 - layer.momentum**count)
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


def _without_momentum(node: Any) -> Any:
    """Return a layer that keeps the statistics of the last batch alone; other nodes unchanged."""
    if not _is_batch_norm(node):
        return node
    layer = copy.copy(node)
    object.__setattr__(layer, "momentum", 0.0)
    return layer
