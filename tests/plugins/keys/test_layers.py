"""What inner layers compute, found by key; below the compiler but for the runs at the end."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError, PathError
from fulgurite_keys import L2, KeyedTask, Losses, Metrics, keyed, sow
from fulgurite_keys.layers import LayerOutputs, find_layers, tap_layers
from fulgurite_keys.paths import format_parts, parse
from fulgurite_keys.scope import KeyPath
from fulgurite_metrics import Norm


def run_keys(model: Any, call: Any, *keys: str) -> tuple[Any, list[Any]]:
    """Return what `call(model)` returns, and what the keys find."""
    paths = [KeyPath.parse(key, "test") for key in keys]
    outputs = LayerOutputs(model, paths)
    result = outputs.run(lambda module, batch: call(module), model, None)
    return result, [outputs.resolve(path) for path in paths]


class Net(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net(x)


def make_net() -> Net:
    return Net(eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0)))


@pytest.mark.full
def test_layers_of_a_model_that_knows_nothing_of_it() -> None:
    model = make_net()
    inputs = jnp.ones((5, 3))
    keys = ("interms.net.layers[0]", "interms.net.layers[0][0]", "interms.net.**")
    outs, (hidden, first, all_layers) = run_keys(
        model, lambda model: jax.vmap(model)(inputs), *keys
    )
    assert (outs == jax.vmap(model)(inputs)).all()
    assert (hidden == jax.vmap(model.net.layers[0])(inputs)).all()
    assert hidden.shape == (5, 4) and (first == hidden[0]).all()
    names = ["net", "net.layers[0]", "net.layers[1]", "net.layers[2]"]
    assert sorted(all_layers) == names
    assert [format_parts(layer) for layer in find_layers(model)] == names


def test_only_layers_that_are_asked_for_are_touched() -> None:
    model = make_net()
    tapped = tap_layers(model, [parse("net.layers[1]")])
    layers = tapped.net.layers
    assert [type(layer) is eqx.nn.Linear for layer in layers] == [True, False, True]
    assert isinstance(layers[1], eqx.nn.Linear) and type(layers[1]).__name__ == "Linear"
    assert tap_layers(model, []) is model


class Block(eqx.Module):
    lin: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        self.lin = eqx.nn.Linear(8, 8, key=key)


class Stack(eqx.Module):
    blocks: Block

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def apply_block(carry: jax.Array, arrays: Any) -> Any:
            return jnp.tanh(eqx.combine(arrays, static).lin(carry)), None

        return jax.lax.scan(apply_block, x, arrays)[0]


def make_stack() -> Stack:
    return Stack(eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 6)))


@pytest.mark.full
def test_stacked_blocks_under_scan_and_remat() -> None:
    stack = make_stack()
    inputs = jnp.ones((5, 8))
    _, (stacked, second) = run_keys(
        stack,
        lambda model: jax.vmap(model)(inputs),
        "interms.blocks.lin",
        "interms.blocks.lin[2]",
    )
    assert stacked.shape == (6, 5, 8) and (second == stacked[2]).all()
    hidden = inputs
    linear = hidden
    for index in range(3):
        weight = stack.blocks.lin.weight[index]
        bias = stack.blocks.lin.bias
        assert bias is not None
        linear = hidden @ weight.T + bias[index]
        hidden = jnp.tanh(linear)
    assert jnp.allclose(second, linear, atol=1e-6)


def test_a_layer_called_twice() -> None:
    model = make_net()

    def call(model: Net) -> jax.Array:
        first, second = jnp.ones(3), jnp.zeros(3)
        return model.net(first) + model.net(second)

    _, (first, both) = run_keys(model, call, "interms.net.__call__[0]", "interms.net.__call__")
    assert (first == model.net(jnp.ones(3))).all() and len(both) == 2
    with pytest.raises(ModelError, match=r"interms\.net was computed 2 times .*__call__\[1\]"):
        run_keys(model, call, "interms.net")
    with pytest.raises(PathError, match=r"no interms\.net\.__call__\[2\]"):
        run_keys(model, call, "interms.net.__call__[2]")


def test_a_layer_that_was_not_called_and_one_that_is_not_there() -> None:
    model = make_net()
    with pytest.raises(PathError, match=r"net\.layers\[2\] was not called"):
        run_keys(model, lambda model: model.net.layers[0](jnp.ones(3)), "interms.net.layers[2]")
    with pytest.raises(
        PathError, match=r"Did you mean 'interms\.net'\? Layers and sown names: net"
    ):
        run_keys(model, lambda model: model.net(jnp.ones(3)), "interms.nets")


def test_sown_values_have_names_beside_layers() -> None:
    def call(model: Net) -> jax.Array:
        return sow("double", 2 * model.net(jnp.ones(3)))

    model = make_net()
    outs, (double, odd) = run_keys(model, call, "interms.double", "interms.double[1]")
    assert (double == outs).all() and odd == outs[1]


@pytest.mark.full
def test_batch_norm_shows_its_output_without_its_state() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")

    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm

    def call(model: Normed) -> Any:
        apply = jax.vmap(model.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return apply(jnp.arange(12.0).reshape(4, 3), state)

    (outs, _), (shown,) = run_keys(Normed(norm), call, "interms.norm")
    assert (shown == outs).all()


def test_two_plugins_may_ask_for_the_same_layer() -> None:
    model = make_net()
    key = KeyPath.parse("interms.net.layers[0]", "test")
    outer, inner = LayerOutputs(model, [key]), LayerOutputs(model, [key])

    def call(module: Any, batch: Any) -> Any:
        return inner.run(lambda module, batch: module.net(batch), module, batch)

    outer.run(call, model, jnp.ones(3))
    assert (outer.resolve(key) == inner.resolve(key)).all()


def make_data() -> fg.ArrayData:
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    return fg.ArrayData({"x": inputs, "y": inputs[:, :2]}, 10)


def list_arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


@pytest.mark.full
def test_parameters_are_the_same_with_and_without_a_metric_on_a_layer() -> None:
    task = KeyedTask(make_net(), {"x": "batch.x"}, optimizer=optax.adam(1e-2))
    losses = Losses(fit=L2("preds", "batch.y"))
    metrics = Metrics(hidden=keyed(Norm.from_vectors, "interms.model.net.layers[0]"))
    first = fg.Engine(steps=20, plugins=[losses]).fit(task, make_data())
    second = fg.Engine(steps=20, plugins=[losses, metrics]).fit(task, make_data())
    for left, right in zip(list_arrays(first.module), list_arrays(second.module), strict=True):
        assert (left == right).all()
    assert second.metrics["train"]["metrics/hidden"] > 0
