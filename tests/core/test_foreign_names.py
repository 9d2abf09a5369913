"""Names from other libraries are answered with ours."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from models import Linear, init_module, regression

ENGINE = fg.Engine(steps=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("val", "Evaluator"),
        ("val_data", "Evaluator"),
        ("validation_data", "Evaluator"),
        ("val_dataloaders", "Evaluator"),
        ("train_dataloaders", "second argument"),
        ("max_steps", "give steps="),
        ("callbacks", r"plugins=\[\.\.\.\]"),
        ("run_dir", r"fg\.Engine\(run_dir=\.\.\.\)"),
        ("log_every_n_steps", r"fg\.Engine\(log_every=\.\.\.\)"),
    ],
)
def test_arguments_of_fit_of_other_trainers_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Engine.fit has no argument '{name}': .*{hint}"):
        ENGINE.fit(Linear, regression(), **{name: None})  # type: ignore[arg-type]


def test_a_third_positional_argument_of_fit_is_told_of_the_evaluator() -> None:
    data = regression()
    for more in ((data,), (data, data)):
        with pytest.raises(ConfigurationError, match=r"takes 2: .*plugins=\[Evaluator\('val'"):
            ENGINE.fit(Linear, data, *more)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        ENGINE.fit(Linear, data, no_such=1)  # type: ignore[call-arg]
    for call in (ENGINE.evaluate, ENGINE.predict):
        with pytest.raises(ConfigurationError, match=r"no argument 'dataloaders': .*second"):
            call(Linear(), dataloaders=data)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="Engine has no argument 'val': .*Evaluator"):
        fg.Engine(val=data)  # type: ignore[call-arg]


def test_logging_by_a_method_of_the_module_gets_a_hint() -> None:
    class Logging(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            self.log("loss", 0)  # type: ignore[attr-defined]
            return super().training_step(batch, ctx)

    class Other(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return self.logg  # type: ignore[attr-defined]

    data = regression(8)
    for call in (ENGINE.fit, ENGINE.evaluate, ENGINE.predict):
        with pytest.raises(AttributeError, match="no attribute 'log'") as caught:
            call(init_module(Logging), data)
        notes = "\n".join(caught.value.__notes__)
        assert "a module has no 'log' here: return what is to be logged, fg.Output(" in notes
        with pytest.raises(AttributeError, match="no attribute 'logg'") as caught:
            call(init_module(Other), data)
        assert not any("a module has no" in note for note in caught.value.__notes__)


def test_multi_steps_of_optax_gets_a_hint() -> None:
    wrapped: Any = optax.MultiSteps(optax.sgd(0.1), 2)

    class Wrapping(Linear):
        def configure_optimizers(self) -> Any:
            return wrapped

    data = regression(8)
    hint = r"optax\.MultiSteps is not .*GradientAccumulation\(n\) of fulgurite-optimizers"
    with pytest.raises(ConfigurationError, match=rf"Wrapping\.configure_optimizers: {hint}"):
        ENGINE.fit(Wrapping, data)
    with pytest.raises(ConfigurationError, match=rf"fg\.OptimizerSpec: {hint}"):
        fg.OptimizerSpec(wrapped)
    task = fg.Task(lambda x: x, loss=lambda preds, batch: preds, optimizer=wrapped)
    with pytest.raises(ConfigurationError, match=rf"Task\.configure_optimizers: {hint}"):
        ENGINE.fit(task, [(np.ones(2, np.float32),)])


def test_a_single_optimizer_spec_is_the_optimizer_of_what_it_selects() -> None:
    x = np.asarray([[1, 2, -1], [0, 1, 3]], np.float32)
    weight, bias = np.asarray([[0.5, -1, 2]], np.float32), np.asarray([0.25], np.float32)
    net = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    net = eqx.tree_at(lambda net: (net.weight, net.bias), net, (weight, bias))
    net = jax.tree.map(jnp.asarray, net)
    spec = fg.OptimizerSpec(optax.sgd(0.1), params="model.weight")
    task = fg.Task(net, loss=lambda preds, batch: preds[:, 0] ** 2, optimizer=spec)
    module = ENGINE.fit(task, [(x,)]).module.model
    gradient = (2 * (x @ weight.T + bias) * x).mean(0)
    np.testing.assert_allclose(module.weight, weight - 0.1 * gradient, rtol=1e-5)
    np.testing.assert_array_equal(module.bias, bias)

    class Specified(Linear):
        def configure_optimizers(self) -> fg.OptimizerSpec:  # type: ignore[override]
            return fg.OptimizerSpec(optax.sgd(0.1))

    data = regression(8)
    first, second = (ENGINE.fit(model, data).state for model in (Specified, Linear))
    assert first.module.weight.tobytes() == second.module.weight.tobytes()
    assert jax.tree.structure(first.opt_state) == jax.tree.structure(second.opt_state)
