"""Subclasses of the engine: `train_step` is the seam that `fit`, fused steps and `step` share."""

import inspect
import traceback
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import pytest
from fulgurite._src.engine import SET_BY_PROGRAMS, SET_ONCE
from fulgurite.errors import ConfigurationError, ModelError
from models import (
    Classifier,
    Counting,
    Linear as LinearModel,
    assert_same_bits,
    classes,
    numbers,
    regression,
    trained,
)


class Halving(fg.Engine):
    """Takes half of the gradient, by the parts of an update."""

    def train_step(
        self, state: fg.TrainState, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
    ) -> tuple[fg.TrainState, fg.Output]:
        grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
        return update_rule.apply_gradients(
            state, jax.tree.map(lambda grad: 0.5 * grad, grads), output
        )


@pytest.mark.full
def test_subclass_has_equal_bits_by_fit_fused_fit_and_step() -> None:
    data = classes(48, shuffle=True)
    fitted = Halving(steps=10).fit(Classifier, data)
    fused = Halving(steps=10).fit(Classifier, data, steps_per_execution=8)
    engine = Halving(steps=10)
    state = engine.init_state(Classifier, data)
    for batch in engine.iter_batches(data):
        state, _ = engine.step(state, batch)
    assert_same_bits(trained(fitted.state), trained(fused.state))
    assert_same_bits(trained(fitted.state), trained(state))
    plain = fg.Engine(steps=10).fit(Classifier, data)
    assert not np.array_equal(plain.module.mlp.layers[0].weight, fitted.module.mlp.layers[0].weight)


def test_half_the_gradient_is_half_the_step_of_gradient_descent() -> None:
    whole, half = (
        kind(steps=1).fit(LinearModel, regression()).module.weight for kind in (fg.Engine, Halving)
    )
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)


def test_a_subclass_that_wraps_the_step_keeps_everything_around_it() -> None:
    class Twice(fg.Engine):
        def train_step(
            self, state: fg.TrainState, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
        ) -> tuple[fg.TrainState, fg.Output]:
            state, _ = super().train_step(state, batch, ctx, update_rule)
            return super().train_step(state, batch, ctx.fork("second"), update_rule)

    observed = []

    class Watching:
        @fg.hookimpl
        def step_metrics(self, grads: Any, updates: Any) -> Any:
            return {"gradient": grads.weight, "update": updates.weight}

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            observed.append((record.step, record.stream))

    result = Twice(steps=3, log_every=3, plugins=[Watching()]).fit(Counting, numbers([0]))
    assert float(result.module.weight) == -6 and int(result.state.step) == 3
    assert (
        result.metrics["train"]["watching/gradient"],
        result.metrics["train"]["watching/update"],
    ) == (1, -1)
    assert (3, "exact") in observed


def test_subclass_that_returns_no_step_result_is_an_error() -> None:
    class Gradientless(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            state, output = super().train_step(state, batch, ctx, update_rule)
            return state, output.replace(grads=None)

    class Forgetful(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            return super().train_step(state, batch, ctx, update_rule)[0]

    assert float(Gradientless(steps=1).fit(Counting, numbers([0])).module.weight) == -1
    with pytest.raises(ModelError, match="train_step"):
        Forgetful(steps=1).fit(Counting, numbers([0]))


def test_overriding_step_alone_is_an_error() -> None:
    class Stepping(fg.Engine):
        def step(self, state: Any, batch: Any, **options: Any) -> Any:
            return super().step(state, batch, **options)

    with pytest.raises(
        ConfigurationError, match="Stepping overrides step; fit never calls it: override tr"
    ):
        Stepping(steps=1)

    class Both(Stepping):
        train_step = Halving.train_step

    assert float(Both(steps=1).fit(Counting, numbers([0])).module.weight) == -0.5


def test_init_state_evaluate_and_predict_may_be_overridden() -> None:
    class Changed(fg.Engine):
        def init_state(self, model: Any, data: Any) -> fg.TrainState:
            state = super().init_state(model, data)
            return state.replace(module=jax.tree.map(lambda leaf: leaf + 10, state.module))

        def evaluate(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            return {**super().evaluate(*arguments, **options), "more": 1}

        def predict(self, *arguments: Any, **options: Any) -> Any:
            return super().predict(*arguments, **options) + 1

    engine = Changed(steps=2)
    state = engine.init_state(Counting, numbers([0]))
    result = engine.fit(data=numbers([0]), state=state)
    assert float(result.module.weight) == 8
    assert engine.evaluate(result, numbers([0])) == {"updates": -8, "more": 1}
    assert engine.predict(result, numbers([3, 4])).tolist() == [4, 5]


def test_the_signature_of_an_engine_is_that_of_its_arguments() -> None:
    """Editors, `help` and configurations read it."""
    assert {"steps", "seed", "plugins", "run_dir"} <= inspect.signature(fg.Engine).parameters.keys()

    class Scaled(fg.Engine):
        def __init__(self, scale: float, *, steps: int = 5) -> None:
            super().__init__(steps=steps)
            self.scale = scale

    class Further(Scaled):
        pass

    for engine in (Scaled, Further):
        assert list(inspect.signature(engine).parameters) == ["scale", "steps"]
        assert engine(2.0).steps == 5


def test_a_subclass_cannot_overwrite_attributes_of_the_engine() -> None:
    class Own(fg.Engine):
        """Sets an attribute after the engine's constructor, or before it."""

        def __init__(self, name: str, value: Any, *, early: bool = False) -> None:
            if early:
                setattr(self, name, value)
            super().__init__(steps=1, autoload=False)
            if not early:
                setattr(self, name, value)

    # Every attribute that the constructor sets is one of these.
    attributes = vars(fg.Engine(steps=1, autoload=False)).keys() - SET_BY_PROGRAMS
    assert {"epochs", "plugins", "actions", "_programs"} < attributes == SET_ONCE
    for name in sorted(attributes):
        for early in (False, True):
            with pytest.raises(ConfigurationError, match=f"'{name}' is the engine's own") as caught:
                Own(name, 3, early=early)
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert {frame.filename for frame in frames} == {__file__}
    for name in ("step", "forward"):
        with pytest.raises(ConfigurationError, match=f"hide the method {name}"):
            Own(name, 3)
    # What is nobody's, what programs set, and a function in place of a method are all right.
    assert Own("length", 3).length == 3  # type: ignore[attr-defined]
    assert Own("run_dir", "runs/own").run_dir == "runs/own"
    assert Own("forward", print).forward is print
    for name, value in (("steps", 5), ("plugins", lambda self: []), ("run_dir", "runs/own")):
        with pytest.raises(ConfigurationError, match=f"Mine.{name} is hidden"):
            type("Mine", (fg.Engine,), {name: value})
