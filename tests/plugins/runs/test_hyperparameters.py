"""The numbers of optimizers in the description of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_runs import RunPlugin

HALF = 0.5


class Model(fg.Module):
    first: jax.Array
    second: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.first = jnp.zeros(2)
        self.second = jnp.zeros(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.first.sum() + self.second.sum())


def describe(optimizer: Any) -> dict[str, Any]:
    """The section of the manifest of a run with this optimizer, or these by name."""

    class Learner(Model):
        def configure_optimizers(self) -> Any:
            return optimizer

    manifests: list[Any] = []
    notes = fg.LambdaPlugin(on_fit_start=lambda run: manifests.append(run.manifest))
    engine = fg.Engine(steps=1, plugins=[RunPlugin(), notes], autoload=False)
    engine.fit(Learner, [np.zeros(1, np.float32)])
    return manifests[0]["hyperparameters"]


@dataclass(frozen=True)
class Ramp:
    """A schedule that is an object."""

    slope: float

    def __call__(self, step: Any) -> Any:
        return self.slope * step


class Decay:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def at(self, step: Any) -> Any:
        return self.rate * HALF**step


def scale(factor: float, step: Any) -> Any:
    return factor * step


ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "eps_root": 0.0, "nesterov": False}


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: optax.adam(1e-3, b2=0.99),
            {f"scale_by_adam.{name}": value for name, value in ADAM.items()}
            | {"scale.step_size": -1e-3},
        ),
        (
            lambda: optax.chain(optax.scale(2.0), optax.scale(-3.0)),
            {"scale.step_size": 2.0, "scale.step_size (2)": -3.0},
        ),
        (lambda: optax.sgd(Ramp(0.25)), {"Ramp.slope": 0.25}),
        (lambda: optax.sgd(Decay(0.25).at), {"Decay.rate": 0.25, "Decay.at.HALF": 0.5}),
        (
            lambda: optax.sgd(partial(scale, 0.125)),
            {"scale_by_learning_rate.learning_rate[0]": 0.125},
        ),
        (lambda: optax.sgd(lambda step, rate=0.25: rate), {"<lambda>.rate": 0.25}),
        (lambda: optax.sgd(jnp.float32(0.1)), {"scale.step_size": -0.1}),
    ],
)
def test_numbers_in_the_functions_of_an_optimizer_have_names(
    make: Callable[[], Any], expected: dict[str, Any]
) -> None:
    section = describe(make())
    assert section["state"] == {}
    assert expected.items() <= section["program"].items()


@pytest.mark.full
def test_injected_numbers_are_in_the_state_and_scheduled_ones_in_the_program() -> None:
    section = describe(
        optax.inject_hyperparams(optax.adamw)(
            learning_rate=0.1, weight_decay=Ramp(0.25), b1=jnp.asarray(0.8)
        )
    )
    values = {path.rpartition(".")[2]: entry for path, entry in section["state"].items()}
    assert values["learning_rate"] == {"value": 0.1, "program": 0.1}
    assert values["b1"]["value"] == 0.8
    assert values.keys() == {"learning_rate", "b1", "b2", "eps", "eps_root"}
    assert section["program"]["Ramp.slope"] == 0.25
    # The defaults of `adamw` are not what runs.
    assert not any(name.startswith("adamw.") for name in section["program"])


def test_a_circle_and_a_model_within_a_schedule_are_passed_by() -> None:
    circle: dict[str, Any] = {"rate": 0.5}
    circle["self"] = circle
    model = Model()

    def schedule(step: Any) -> Any:
        return circle["rate"] + 0.0 * model.first.sum()

    program = describe(optax.sgd(schedule))["program"]
    names = [name for name in program if "circle" in name or "model" in name]
    assert [(name.rpartition(".")[2], program[name]) for name in names] == [("rate", 0.5)]


def test_arrays_without_numbers_in_an_optimizer_are_no_hyperparameters() -> None:
    key = jax.random.key(3)
    names = np.array(["weight", "bias"])

    def make_noise(scale: float) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            assert names.size == 2
            noise = scale * jax.random.normal(key)
            return jax.tree.map(lambda update: update + noise, updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    section = describe(optax.chain(make_noise(0.5), optax.sgd(1.0)))
    program = {name.rpartition(".")[2]: number for name, number in section["program"].items()}
    assert program["scale"] == 0.5
    assert not {"key", "names"} & program.keys()
    injected = optax.inject_hyperparams(lambda key, rate: optax.sgd(rate))(key=key, rate=0.5)
    state = {path.rpartition(".")[2]: entry for path, entry in describe(injected)["state"].items()}
    assert state["rate"]["value"] == 0.5
    assert state["key"]["value"] == "key<fry>[]"
