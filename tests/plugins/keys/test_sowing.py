"""Values named by `sow`, collected through the transformations of jax; all of it eager or by
shape, without a fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fulgurite.errors import ModelError
from fulgurite_keys import sow
from fulgurite_keys.sowing import Sown, collect_sown


def collect(function: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Return what a function returns, and everything that it sows."""
    with collect_sown(lambda name: True) as sown:
        out = function(*args)
    return out, sown.values


def test_vmap_puts_the_mapped_axis_in_front() -> None:
    weight = jnp.ones((3, 4))
    values = collect(jax.vmap(lambda x: sow("h", x @ weight).sum()), jnp.ones((5, 3)))[1]
    assert values["h"][0].shape == (5, 4)
    values = collect(jax.vmap(lambda x: sow("h", x), in_axes=1), jnp.ones((2, 7, 4)))[1]
    assert values["h"][0].shape == (7, 2, 4)


def apply_blocks(weights: jax.Array, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def apply_block(carry: jax.Array, weight: jax.Array) -> Any:
        sow("lin", carry @ weight)  # a statement, whose result nobody uses
        return jnp.tanh(carry @ weight), None

    return jax.lax.scan(apply_block, x, weights)[0]


@pytest.mark.full
def test_blocks_under_scan_and_checkpoint_and_their_gradient() -> None:
    weights = jax.random.normal(jax.random.key(0), (6, 8, 8))
    inputs = jnp.ones((5, 8))

    def compute_loss(weights: jax.Array) -> tuple[jax.Array, Any]:
        out, values = collect(jax.vmap(lambda x: apply_blocks(weights, x)), inputs)
        return out.sum(), values

    def compute_without(weights: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: apply_blocks(weights, x))(inputs).sum()

    grads, values = jax.grad(compute_loss, has_aux=True)(weights)
    assert values["lin"][0].shape == (6, 5, 8)
    hidden = inputs
    for block in range(6):
        assert jnp.allclose(values["lin"][0][block], hidden @ weights[block], atol=1e-5)
        hidden = jnp.tanh(hidden @ weights[block])
    assert (grads == jax.grad(compute_without)(weights)).all()


def test_a_loss_on_a_sown_value_has_its_gradient() -> None:
    inputs = jnp.arange(15.0).reshape(5, 3) / 15

    def compute_loss(weight: jax.Array) -> jax.Array:
        function = jax.checkpoint(lambda weight: jnp.tanh(sow("h", inputs @ weight)))
        out, values = collect(function, weight)
        return out.sum() + (values["h"][0] ** 2).sum()

    def compute_by_hand(weight: jax.Array) -> jax.Array:
        hidden = inputs @ weight
        return jnp.tanh(hidden).sum() + (hidden**2).sum()

    weight = jax.random.normal(jax.random.key(0), (3, 4))
    expected = jax.grad(compute_by_hand)(weight)
    assert jnp.allclose(jax.jit(jax.grad(compute_loss))(weight), expected, rtol=1e-5)


def test_a_name_sown_twice_gives_both() -> None:
    values = collect(lambda x: sow("a", x) + sow("a", x + 1), 1.0)[1]
    assert values["a"] == [1.0, 2.0]


def test_scan_stacks_and_while_gives_the_last() -> None:
    def run_scan(x: Any) -> Any:
        def body(carry: Any, x: jax.Array) -> Any:
            return sow("c", x + carry), None

        return jax.lax.scan(body, 1, jnp.arange(5))[0]

    assert collect(run_scan, 0)[1]["c"][0].tolist() == [1, 2, 4, 7, 11]

    def run_while(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda v: v < 5, lambda v: sow("v", v) + 1, x)

    assert collect(run_while, 0)[1]["v"][0] == 4


def test_values_sown_in_a_branch_of_cond() -> None:
    def run(x: jax.Array, other: Callable[[Any], Any]) -> jax.Array:
        return jax.lax.cond(x == 1, lambda x: sow("x", x), other, x)

    assert collect(run, 1.0, lambda x: sow("x", x + 2))[1]["x"] == [1]
    assert collect(lambda x: run(x, lambda x: sow("x", x + 3)), 0.0)[1]["x"] == [3]
    assert collect(run, 0.0, lambda x: x)[1]["x"] == [0]  # the branch that was not taken
    with pytest.raises(ModelError, match=r"'x' is float32\[3\] in one .* float32\[\] in another"):
        collect(run, 1.0, lambda x: sow("x", jnp.ones(3) * x)[0])


def test_jit_keeps_its_name_and_values_leave_it() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return sow("k", {"relu": jax.nn.relu(x)})["relu"] + 1

    def run(x: jax.Array) -> Any:
        return collect(jax.jit(inner), x)

    assert collect(jax.jit(inner), -jnp.ones(3))[1]["k"][0]["relu"].tolist() == [0, 0, 0]
    assert "name=inner" in str(jax.make_jaxpr(run)(jnp.ones(3)))


@jax.custom_vjp
def double(x: jax.Array) -> jax.Array:
    return sow("q", x) * 2


double.defvjp(lambda x: (double(x), None), lambda _, grad: (2 * grad,))


@pytest.mark.parametrize(
    "function",
    [double, lambda x: jax.lax.scan(lambda carry, _: (double(carry), None), x, length=2)[0]],
    ids=["direct", "in a scan"],
)
def test_inside_a_custom_derivative_is_an_error_if_asked_for(function: Any) -> None:
    with pytest.raises(ModelError, match="'q' is computed inside custom_vjp_call"):
        collect(function, jnp.ones(2))
    with collect_sown(lambda name: name != "q") as sown:
        function(jnp.ones(2))
    assert not sown.values


def test_in_the_condition_of_a_loop_is_an_error() -> None:
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda v: sow("v", v) < 5, lambda v: v + 1, x)

    with pytest.raises(ModelError, match="'v' is computed inside the condition of a while_loop"):
        collect(run, 0)


def test_a_gradient_within_the_model_sows_values_only() -> None:
    values = collect(jax.grad(lambda x: sow("z", x**2).sum()), jnp.full(2, 3.0))[1]
    assert values["z"][0].tolist() == [9, 9]


def test_several_collect_what_each_asks_for() -> None:
    def run(x: jax.Array) -> tuple[Sown, Sown]:
        with collect_sown(lambda name: name != "b") as outer:
            with collect_sown(lambda name: name != "a") as inner:
                jax.jit(lambda x: (sow("a", x), sow("b", x), sow("c", x)))(x)
        return outer, inner

    outer, inner = run(jnp.ones(2))
    assert outer.values.keys() == {"a", "c"} and inner.values.keys() == {"b", "c"}
    assert outer.names == inner.names == {"a", "b", "c"}


def test_nobody_asks_and_the_program_is_the_same() -> None:
    def compute(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * 2)

    def compute_sown(x: jax.Array) -> jax.Array:
        return jnp.tanh(sow("twice", x * 2))

    texts = [
        jax.jit(function).lower(jnp.ones(3)).as_text().replace("compute_sown", "compute")
        for function in (compute, compute_sown)
    ]
    assert texts[0] == texts[1]
