"""Selectors as masks of optimizers, where the optimizer gets a part of the module."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import PathError
from fulgurite_optimizers import (
    BackboneFinetuning,
    Freeze,
    GradientAccumulation,
    MultiOptimizer,
    Phase,
    optimize_only,
)

STEPS = 3
Decay = Callable[[Any], optax.GradientTransformation]


class Net(fg.Module):
    """Ones, which nothing but weight decay changes."""

    body: eqx.nn.Linear
    head: eqx.nn.Linear
    configure: Callable[[], Any] = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        sums = [jnp.sum(leaf) for leaf in jax.tree.leaves(self)]
        return fg.Output(0.0 * sum(sums, start=jnp.zeros(())))

    def configure_optimizers(self) -> Any:
        return self.configure()


def decay_by_sgd(mask: Any) -> optax.GradientTransformation:
    """Each step takes a tenth."""
    return optax.chain(optax.add_decayed_weights(0.5, mask=mask), optax.sgd(0.2))


def decay_by_adamw(mask: Any) -> optax.GradientTransformation:
    return optax.adamw(0.2, weight_decay=0.5, mask=mask)


def decay_by_muon(mask: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(0.2, weight_decay=0.5, weight_decay_mask=mask)


def decay_in_groups(mask: Any) -> optax.GradientTransformation:
    def name_group(path: Any, _: Any) -> str:
        return "weights" if "weight" in jax.tree_util.keystr(path) else "others"

    groups: Any = {"weights": decay_by_sgd(mask), "others": decay_by_sgd(mask)}
    return optax.partition(
        groups, lambda params: jax.tree_util.tree_map_with_path(name_group, params)
    )


def fit(optimizer: Any, *plugins: Any, steps: int = STEPS) -> Net:
    body, head = (eqx.nn.Linear(2, size, key=jax.random.key(0)) for size in (3, 1))
    ones = jax.tree.map(jnp.ones_like, eqx.filter((body, head), eqx.is_array))
    body, head = eqx.combine(ones, (body, head))
    net = Net(body, head, lambda: optimizer)
    return fg.Engine(steps=steps, plugins=plugins).fit(net, [np.zeros((4, 2))]).module


def check_factors(net: Net, **factors: float) -> None:
    """Check what is left of each array; 1 where it is not given."""
    for path in ("body_weight", "body_bias", "head_weight", "head_bias"):
        layer, name = path.split("_")
        array = getattr(getattr(net, layer), name)
        np.testing.assert_allclose(array, factors.get(path, 1.0), rtol=1e-5, err_msg=path)


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "decay",
    [
        decay_by_sgd,
        pytest.param(decay_by_adamw, marks=pytest.mark.full),
        pytest.param(decay_by_muon, marks=pytest.mark.full),
        decay_in_groups,
    ],
)
@pytest.mark.parametrize("mask", [fg.exclude("bias"), fg.select("body.weight", "head.weight")])
def test_mask_may_choose_nothing_of_what_is_left(decay: Decay, mask: Any) -> None:
    left = 0.9**STEPS
    check_factors(fit(decay(mask)), body_weight=left, head_weight=left)
    check_factors(fit(decay(mask), Freeze("body")), head_weight=left)
    check_factors(fit(decay(mask), Freeze("bias")), body_weight=left, head_weight=left)
    check_factors(fit(decay(mask), Freeze("weight")))


@pytest.mark.full
@pytest.mark.parametrize("mask", [fg.exclude("bias"), fg.exclude(lambda net: net.body.bias)])
def test_mask_may_choose_nothing_of_the_part_of_an_optimizer(mask: Any) -> None:
    left = 0.9**STEPS
    optimizer = decay_by_sgd(mask)
    phase = Phase(optimizer, "head.weight", accumulate=GradientAccumulation(2))
    for net in (
        fit(optimize_only(optimizer, "head.weight")),
        fit(None, MultiOptimizer(loss=phase)),
        fit(optimizer, Freeze("body"), Freeze("head.bias")),
    ):
        check_factors(net, head_weight=left)
    net = fit(optimizer, Freeze("bias", until=2), Freeze("body", until=STEPS))
    check_factors(net, head_weight=left, **({} if "bias" in mask.text else {"head_bias": 0.9}))


@pytest.mark.full
def test_mask_may_choose_nothing_of_a_remainder_or_a_backbone() -> None:
    optimizer = decay_by_sgd(fg.exclude("bias"))
    accumulation = GradientAccumulation(2, "steps")
    net = fit(optimizer, accumulation, Freeze("bias"))
    check_factors(net, body_weight=0.9**2, head_weight=0.9**2)
    net = fit(optimizer, BackboneFinetuning("body", until=1, rate=1.0), Freeze("bias"))
    check_factors(net, body_weight=0.9**2, head_weight=0.9**3)


@pytest.mark.parametrize("plugins", [[], [Freeze("body")], [GradientAccumulation(2)]])
def test_mask_that_chooses_nothing_in_the_module_is_an_error(plugins: Any) -> None:
    """It would decay biases in silence."""
    with pytest.raises(PathError, match=r"'bais' selects no array of Net.*nearest are:.*bias"):
        fit(decay_by_sgd(fg.exclude("bais")), *plugins)


def test_selection_outside_of_an_optimizer_must_choose_something() -> None:
    """A selector that an optimizer has used is as strict as before."""
    mask = fg.exclude("bias")
    fit(decay_by_sgd(mask), Freeze("bias"), steps=1)
    with pytest.raises(PathError, match="'bias' selects no array"):
        mask({"weight": jnp.ones(2)})
