"""Hooks that build a program: the module, its optimizers and gradients, and evaluations."""

import copy
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import PathError
from hook_plugins import engine, plugin
from jax.core import Tracer
from models import Act, Counting, numbers


@pytest.mark.hook("transform_module")
def test_transform_module_is_folded_before_optimizers() -> None:
    """1 * 2 + 3, less 1 in each of 2 steps; what comes later sees the dtype of the new module."""
    dtypes: set[Any] = set()

    def set_weight(module: Any, weight: Any) -> Any:
        module = copy.copy(module)
        object.__setattr__(module, "weight", weight)
        return module

    keys: dict[str, set[tuple[int, ...]]] = {"double": set(), "shy": set()}

    def note_key(name: str, key: Any) -> None:
        if not isinstance(key, Tracer):
            keys[name].add(tuple(jax.random.key_data(key).tolist()))

    def double(self: Any, module: Any, key: Any) -> Any:
        note_key("double", key)
        return set_weight(module, module.weight * 2)

    def add(self: Any, module: Any) -> Any:
        return set_weight(module, (module.weight + 3).astype(jnp.float16))

    def look(self: Any, module: Any) -> None:
        dtypes.add(module.weight.dtype)

    start = set_weight(Counting(), jnp.float32(1))
    parts = [
        plugin("double", transform_module=double),
        plugin("shy", transform_module=lambda self, module, key: note_key("shy", key)),
        plugin("add", transform_module=add),
        plugin("look", init_plugin_state=look, gradient_transform=look),
    ]
    result = engine(*parts, steps=2).fit(start, numbers([0]))
    assert (result.module.weight.dtype, dtypes) == (jnp.float16, {jnp.dtype(jnp.float16)})
    assert float(result.module.weight) == 3
    assert all(len(of_plugin) == 1 for of_plugin in keys.values()), "the same whenever it is called"
    assert keys["double"].isdisjoint(keys["shy"])


class Models(Counting):
    """Two models, whose plugins act on each."""

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(2)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight.sum())

    def apply_transform(self, transform: Any, key: Any) -> Any:
        weights = [transform(Counting(), jax.random.fold_in(key, i)).weight for i in (0, 1)]
        return eqx.tree_at(lambda model: model.weight, self, jnp.stack(weights))

    def adapt_plugin_state(self, name: str, plugin_state: Any) -> Any:
        return jnp.stack([plugin_state, plugin_state]) if name == "plugin" else plugin_state


def test_a_module_of_several_models_has_a_plugin_act_on_each() -> None:
    def add(self: Any, module: Any, key: Any) -> Any:
        return eqx.tree_at(lambda model: model.weight, module, jax.random.normal(key))

    parts = [
        plugin("plugin", transform_module=add, init_plugin_state=lambda self: jnp.ones(3)),
        plugin("other", init_plugin_state=lambda self: jnp.ones(3)),
    ]
    state = engine(*parts).init_state(Models(), numbers([0]))
    weight = np.asarray(state.module.weight)
    assert weight.shape == (2,)
    assert weight[0] != weight[1]
    assert state.plugin_states["plugin"].shape == (2, 3)
    assert state.plugin_states["other"].shape == (3,)


@pytest.mark.hook("configure_optimizers")
def test_optimizers_of_a_plugin_replace_those_of_the_module() -> None:
    thrice = plugin(
        "thrice", configure_optimizers=lambda self: {"default": fg.OptimizerSpec(optax.sgd(3.0))}
    )
    assert float(engine(thrice, steps=4).fit(Counting(), numbers([0])).module.weight) == -12


def test_an_optimizer_may_update_a_part_of_the_module() -> None:
    """What is not selected gets no gradient, no weight decay and no memory."""

    class Pair(fg.Module):
        first: jax.Array
        second: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(self.first**2) + jnp.sum(self.second**2))

        def configure_optimizers(self) -> Any:
            return {"default": fg.OptimizerSpec(optax.adamw(0.1, weight_decay=0.5), "second")}

    grads = plugin(
        "grads", step_metrics=lambda self, grads: {"leaves": float(len(jax.tree.leaves(grads)))}
    )
    result = engine(grads, steps=3).fit(Pair(jnp.ones(3), jnp.ones(2)), numbers([0]))
    assert result.module.first.tolist() == [1, 1, 1] and result.module.second[0] < 0.9
    assert [leaf.shape for leaf in jax.tree.leaves(result.state.opt_state)] == [(), (2,), (2,)]
    assert result.metrics["train"]["grads/leaves"] == 1
    missing = plugin(
        "missing",
        configure_optimizers=lambda self: {"default": fg.OptimizerSpec(optax.sgd(0.1), "third")},
    )
    with pytest.raises(PathError, match="'third' selects no array"):
        engine(missing, steps=3).fit(Pair(jnp.ones(3), jnp.ones(2)), numbers([0]))


def test_plugin_may_leave_optimizers_to_the_module() -> None:
    assert (
        float(
            engine(plugin("shy", configure_optimizers=lambda self: None), steps=4)
            .fit(Counting(), numbers([0]))
            .module.weight
        )
        == -4
    )


@pytest.mark.hook("gradient_transform")
@pytest.mark.parametrize(
    ("order", "weight"), [(("scale", "clip"), -6.0), (("clip", "scale"), -30.0)]
)
def test_gradient_transforms_are_chained_before_the_optimizer(
    order: tuple[str, ...], weight: float
) -> None:
    """The gradient is 1: scaled to 10 and clipped to 2, or clipped to 1 and scaled to 10."""
    names: list[str] = []

    def giving(transform: optax.GradientTransformation) -> Any:
        return lambda self, optimizer: (names.append(optimizer), transform)[1]

    transforms = {"scale": optax.scale(10.0), "clip": optax.clip(2.0)}
    plugins = [plugin(name, gradient_transform=giving(transforms[name])) for name in order]
    result = engine(*plugins, plugin("shy", gradient_transform=lambda self: None), steps=3).fit(
        Counting(), numbers([0])
    )
    assert float(result.module.weight) == weight
    assert names == ["default", "default"]


@pytest.mark.hook("register_evaluations", "on_evaluate_end")
def test_evaluators_are_run_by_name() -> None:
    calls: list[Any] = []
    answers: list[Any] = []
    spec = fg.Evaluation("test", numbers([2, 4], [9]), metrics={"mean": lambda preds, batch: preds})
    evaluators = plugin(
        "evaluating",
        register_evaluations=lambda self: [
            spec,
            fg.Evaluation("short", numbers([2, 4], [9]), num_batches=1, metrics=spec.metrics),
        ],
        on_evaluate_end=lambda self, run, source, metrics: calls.append(
            (run.step, source, metrics)
        ),
    )

    def evaluate(run: fg.Run) -> None:
        answers.extend([run.evaluate("test"), run.evaluate("short")])

    result = engine(evaluators, Act(fg.At(3), evaluate, "evaluate"), steps=4).fit(
        Counting(), numbers([0])
    )
    assert answers == [{"mean": 5.0}, {"mean": 3.0}]
    assert calls == [(3, "test", answers[0]), (3, "short", answers[1])]
    assert result.metrics["test"] == answers[0]
    assert result.history["test/mean"].tolist() == [5]
    assert result.history.steps("short/mean").tolist() == [3]


def test_plugins_are_told_what_becomes_of_steps_that_are_not_finite_and_when_is_logged() -> None:
    answers: list[Any] = []
    asking = plugin(
        "asking",
        wrap_update_rule=lambda self, on_nonfinite: answers.append(on_nonfinite),
        register_actions=lambda self, log_trigger: answers.append(log_trigger),
    )
    engine(asking, on_nonfinite="skip", log_every=fg.Every(7)).init_state(Counting(), numbers([0]))
    engine(asking, log_every=None)
    assert answers == [fg.Every(7), "skip", None]
