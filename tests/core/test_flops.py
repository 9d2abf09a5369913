"""FLOPs of a traced program, against counts by hand."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.plugins import count_flops, count_model_flops
from jax.sharding import PartitionSpec as P


def trace_and_count(function: Any, *arguments: Any) -> float:
    return count_flops(jax.make_jaxpr(function)(*arguments))


SQUARE = np.ones((4, 4), np.float32)
IMAGES = jnp.ones((2, 3, 8, 8), np.float32)


def repeat_product(matrix: Any) -> Any:
    return jax.lax.scan(lambda product, _: (product @ product, None), matrix, length=10)[0]


def convolve_by_group(kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(IMAGES, kernel, (1, 1), "VALID", feature_group_count=3)


@pytest.mark.parametrize(
    ("function", "arguments", "flops"),
    [
        (jnp.matmul, (np.ones((2, 3)), np.ones((3, 5))), 2 * 2 * 3 * 5),
        # With a batch axis.
        (jnp.matmul, (np.ones((7, 2, 3)), np.ones((7, 3, 5))), 7 * 2 * 2 * 3 * 5),
        (repeat_product, (SQUARE,), 10 * 2 * 64),
        (jax.jit(jax.checkpoint(repeat_product)), (SQUARE,), 10 * 2 * 64),
        (jax.nn.relu, (SQUARE,), 16),
        (jnp.sum, (SQUARE,), 16),
        (lambda rows: rows.at[0].add(rows[1]), (jnp.ones((2, 3)),), 3),
        (lambda count: count * count, (jnp.arange(5),), 0),
        (
            lambda flag, x: jax.lax.cond(flag, lambda: x @ x, lambda: x),
            (jnp.array(True), SQUARE),
            2 * 64,
        ),
        # 5 features of 6 x 6 pixels for 2 examples, from 3 features of 3 x 3.
        (
            lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"),
            (IMAGES, np.ones((5, 3, 3, 3), np.float32)),
            2 * (2 * 5 * 36) * 27,
        ),
        # Two features from each input feature.
        (convolve_by_group, (np.ones((6, 1, 3, 3), np.float32),), 2 * (2 * 6 * 36) * 9),
        # The gradient by the kernel costs as much again, and 432 sums.
        (
            jax.grad(lambda kernel: convolve_by_group(kernel).sum()),
            (jnp.ones((6, 1, 3, 3)),),
            2 * 2 * (2 * 6 * 36) * 9 + 432,
        ),
    ],
)
def test_flops_equal_a_count_by_hand(function: Any, arguments: Any, flops: float) -> None:
    assert trace_and_count(function, *arguments) == flops


def test_model_flops_are_products_that_are_computed_for_the_first_time() -> None:
    gradient = jax.grad(lambda matrix: jnp.tanh(jax.checkpoint(repeat_product)(matrix)).sum())
    program = jax.make_jaxpr(gradient)(SQUARE)
    # Of each of ten products, forward and two backward; those of the second forward pass are not
    # counted, and neither is tanh.
    assert count_model_flops(program) == 3 * 10 * 2 * 64
    assert count_flops(program) > 4 * 10 * 2 * 64
    assert count_model_flops(jax.make_jaxpr(jnp.tanh)(SQUARE)) == 0


def test_a_program_of_one_device_counts_for_the_whole_mesh() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    product = jax.shard_map(
        lambda rows: rows @ jnp.ones((3, 5)), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    assert count_flops(jax.make_jaxpr(product)(jnp.ones((16, 3)))) == 2 * 16 * 3 * 5


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, key: Any) -> None:
        self.weight = jax.random.normal(key, (64, 32))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch @ self.weight) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_flops_of_a_step_do_not_depend_on_how_it_is_run(steps_per_execution: int) -> None:
    counts: list[float] = []

    class Counter:
        @fg.hookimpl
        def on_compile(self, jaxpr: Any) -> None:
            counts.append(count_flops(jaxpr))

    data = fg.ArrayData(np.ones((64, 64), np.float32), batch_size=16)
    engine = fg.Engine(
        steps=4, plugins=[Counter()], autoload=False, steps_per_execution=steps_per_execution
    )
    engine.fit(Line, data)
    # Forward and by the weights; the rest is for each weight or example.
    products = 2 * 2 * 16 * 64 * 32
    assert products < counts[0] < products + 20 * 64 * 32
