"""What a column of the table is: how a fit or an evaluation is run, and what of it is compared with
the oracle."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import fulgurite as fg
import jax
import numpy as np
import optax
import oracle
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_population import Population
from kinds import (
    KINDS,
    Kind,
    Model,
    compute_terms,
    get_params,
    get_weights,
    make_model,
)

TOLERANCES = {
    "float32": (2e-5, 2e-6),
    "complex64": (5e-5, 5e-6),
    "float16": (5e-3, 2e-3),
    "bfloat16": (3e-2, 1e-2),
}
"""Relative and absolute, by the coarsest dtype that takes part; from fine to coarse."""

EVEN = (8, 8, 8)
UNEVEN = (8, 8, 8, 8, 4)


@dataclass(frozen=True)
class Feature:
    """What a user adds to training.

    Attributes:
        plugins: returns the plugins.
        rule: changes of the oracle's rule.
        sizes: of the batches, one for each step.
        num_joined: how many steps are one update, or how many are each update.
        splits: what divides a batch or an update, if anything does.
        averages: whether bare numbers of several batches are averaged.
        dtype: the coarsest that takes part.
        phases: the losses of the module, each with an optimizer of its own.
        model_class: of the model.
        leaves_out: kinds that mean nothing here, as patterns.
        num_devices: over how many the examples are divided.
        settings: of the engine.
        draw: returns the batches, in the place of those of the oracle.
    """

    plugins: Callable[[], Sequence[Any]] = lambda: ()
    _: Any = field(default=None, kw_only=True, repr=False)
    rule: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = EVEN
    num_joined: int | Sequence[int] = 1
    splits: Literal["microbatch", "steps"] | None = None
    averages: bool = False
    dtype: str = "float32"
    phases: tuple[str, ...] | None = None
    model_class: type[Model] = Model
    leaves_out: Sequence[str] = ()
    num_devices: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[], list[oracle.Batch]] | None = None

    def check(self, kind: Kind) -> None:
        """Compare a fit with the oracle."""
        batches = self.make_batches()
        model = make_model(kind, self.make_optimizer(), self.phases, self.model_class)
        data = [kind.pack(batch) for batch in batches]
        result = self.make_engine(kind).fit(model, data)
        training = oracle.train(
            self.make_rule(kind), oracle.make_params(kind.dtype), batches, self.num_joined
        )
        self.compare(kind, result, training)

    def compare(self, kind: Kind, result: fg.FitResult, training: oracle.Training) -> None:
        """Compare weights and recorded losses."""
        self.assert_close(kind, get_params(result.module), training.params[-1])
        prefix = "train" if self.phases is None else f"train/{self.phases[0]}"
        self.assert_close(kind, result.history[f"{prefix}/loss"], training.losses)
        self.assert_close(kind, result.history[f"{prefix}/batch_loss"], training.minimised)

    def assert_close(self, kind: Kind, values: Any, expected: Any) -> None:
        """Compare trees of the same structure, in the tolerance of the coarsest dtype."""
        relative, absolute = TOLERANCES[max(self.dtype, kind.dtype, key=[*TOLERANCES].index)]

        def compare(value: Any, other: Any) -> None:
            np.testing.assert_allclose(
                np.asarray(value, np.float64),
                np.asarray(other, np.float64),
                rtol=relative,
                atol=absolute,
            )

        jax.tree.map(compare, values, expected)

    def make_engine(self, kind: Kind, *others: Any, **settings: Any) -> fg.Engine:
        """Return the engine of the feature.

        Args:
            kind: of the loss.
            others: further plugins.
            settings: further settings.
        """
        plugins = [*self.plugins(), *kind.plugins(self.phases), *others]
        settings = {"log_every": 1, "steps": len(self.sizes), **self.settings, **settings}
        return fg.Engine(plugins=plugins, autoload=False, **settings)

    def make_rule(self, kind: Kind) -> oracle.Rule:
        """Return what the oracle does."""
        return oracle.Rule(kind.terms, **self.rule)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer of the module."""
        return oracle.Rule(oracle.add_up, **self.rule).make_optimizer()

    def make_batches(self) -> list[oracle.Batch]:
        """Return the batches of all steps."""
        return oracle.make_batches(self.sizes) if self.draw is None else self.draw()


class Averaging(Feature):
    """Averages of the weights."""

    def compare(self, kind: Kind, result: fg.FitResult, training: oracle.Training) -> None:
        super().compare(kind, result, training)
        for name, decay in {"averaged": 0.5, "mean": None}.items():
            averaged = get_params(result.view(name).module)
            self.assert_close(kind, averaged, oracle.average(training.params, decay))


class Simultaneous(Feature):
    """Several optimizers at the same weights: both losses are those before the step."""

    def compare(self, kind: Kind, result: fg.FitResult, training: oracle.Training) -> None:
        super().compare(kind, result, training)
        self.assert_close(kind, result.history["train/head/loss"], training.losses)


class Adapters(Feature):
    """Adapters of low rank, which alone are trained. Their first values are random: they are the
    input of the oracle too."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        data = [kind.pack(batch) for batch in batches]
        model = make_model(kind, self.make_optimizer())
        before = self.make_engine(kind).init_state(model, data).module
        result = self.make_engine(kind).fit(model, data)
        training = oracle.train(self.make_rule(kind), get_adapted(before), batches, self.num_joined)
        self.assert_close(kind, get_adapted(result.module), training.params[-1])
        self.assert_close(kind, result.history["train/loss"], training.losses)


def get_adapted(module: Any) -> oracle.Params:
    """Return the weights of a module with an adapter."""
    adapter = module.body.adapters["default"]
    return {**get_params(module), "down": np.asarray(adapter.down), "up": np.asarray(adapter.up)}


class Members(Feature):
    """Two members that differ in their learning rate."""

    RATES = (0.1, 0.05)

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        data = [kind.pack(batch) for batch in batches]
        optimizer = optax.inject_hyperparams(optax.sgd)(oracle.RATE, momentum=oracle.MOMENTUM)
        population = Population(seeds=(0, 1), vary={"learning_rate": self.RATES})
        engine = self.make_engine(kind, population)
        result = engine.fit(population.stack(lambda key: make_model(kind, optimizer)), data)
        for index, rate in enumerate(self.RATES):
            rule = replace(self.make_rule(kind), rate=rate)
            training = oracle.train(rule, oracle.make_params(kind.dtype), batches, self.num_joined)
            member = result.module.take(index)
            self.assert_close(kind, get_params(member), training.params[-1])
            self.assert_close(kind, result.history[f"train/loss[{index}]"], training.losses)


class Window(Feature):
    """The losses of windows of three steps, the last of which has two."""

    def compare(self, kind: Kind, result: fg.FitResult, training: oracle.Training) -> None:
        rule = self.make_rule(kind)
        batches = self.make_batches()
        for number, start in enumerate(range(0, len(batches), 3)):
            part = slice(start, min(start + 3, len(batches)))
            params = training.params[part]
            expected = oracle.measure_window(rule, params, batches[part])
            for name, value in expected.items():
                self.assert_close(kind, result.history[f"train/{name}"][number], value)
            if kind.weigh is not None and kind.dtype == "float32":
                metric = average_predictions(kind, params, batches[part])
                self.assert_close(kind, result.history["train/prediction"][number], metric)


def average_predictions(
    kind: Kind, params: Sequence[oracle.Params], batches: Sequence[oracle.Batch]
) -> float:
    """Return the mean of the predictions over what the loss is a mean over.

    Args:
        kind: of the loss.
        params: the weights that each batch is predicted with.
        batches: of the oracle.
    """
    total = size = 0.0
    for step_params, batch in zip(params, batches, strict=True):
        is_by_token = kind.terms is oracle.average_tokens
        weights = np.asarray(get_weights(batch, None, is_by_token=is_by_token))
        preds = np.asarray(oracle.predict(step_params, batch["x"]))
        total += float(np.sum((preds if is_by_token else preds.mean(1)) * weights))
        size += float(weights.sum())
    return total / size


class Repeated(Feature):
    """An optimizer that runs twice in a step, each time with one half of the batch."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        halves = [
            [{name: array[index::2] for name, array in batch.items()} for index in range(2)]
            for batch in batches
        ]
        model = make_model(kind, self.make_optimizer(), self.phases)
        result = self.make_engine(kind).fit(model, [kind.pack(batch) for batch in batches])
        rule = self.make_rule(kind)
        params = oracle.make_params(kind.dtype)
        training = oracle.train(rule, params, [half for pair in halves for half in pair])
        self.assert_close(kind, get_params(result.module), training.params[-1])
        expected = [
            oracle.measure_window(rule, training.params[2 * index : 2 * index + 2], pair)["loss"]
            for index, pair in enumerate(halves)
        ]
        self.assert_close(kind, result.history["train/loss"], expected)


class Resume(Feature):
    """A run that is killed in the middle of an accumulation, after a checkpoint there."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        data = [kind.pack(batch) for batch in batches]
        model = make_model(kind, self.make_optimizer())
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpointer(fg.At(3), on_exception=False)
            engine = self.make_engine(kind, checkpoints, Killer(), run_dir=folder)
            with pytest.raises(Killed):
                engine.fit(model, data)
            checkpoints = Checkpointer(fg.At(3), on_exception=False)
            engine = self.make_engine(kind, checkpoints, run_dir=folder)
            result = engine.fit(model, data, resume="auto")
        training = oracle.train(
            self.make_rule(kind), oracle.make_params(kind.dtype), batches, self.num_joined
        )
        self.compare(kind, result, training)


class Killed(Exception):
    """Ends a run."""


class Killer:
    """Ends a run after its fourth step."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(4), self.kill)]

    def kill(self, run: fg.Run) -> None:
        raise Killed


class Evaluation(Feature):
    """An evaluation over batches of unequal size, which may be empty."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        model = make_model(kind, self.make_optimizer())
        values = self.evaluate(kind, model, [kind.pack(batch) for batch in batches])
        params = oracle.make_params(kind.dtype)
        expected = oracle.measure(self.make_rule(kind), params, oracle.join(batches))
        self.assert_close(kind, {name: values[name] for name in expected}, expected)
        if "prediction" in values:
            metric = average_predictions(kind, [params] * len(batches), batches)
            self.assert_close(kind, values["prediction"], metric)

    def evaluate(self, kind: Kind, model: Any, data: list[Any]) -> dict[str, Any]:
        """Return the metrics of an evaluation."""
        return self.make_engine(kind).evaluate(model, data)


class EvaluationOfPhases(Evaluation):
    """An evaluation of a module whose losses are functions: that of both phases is the same."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        model = make_model(kind, self.make_optimizer(), self.phases, self.model_class)
        values = self.evaluate(kind, model, [kind.pack(batch) for batch in batches])
        params = oracle.make_params(kind.dtype)
        expected = oracle.measure(self.make_rule(kind), params, oracle.join(batches))
        total = expected.pop("loss")
        self.assert_close(kind, values["loss"], 2 * total)
        for name, value in expected.items():
            self.assert_close(kind, values[f"head/{name}"], value)


class EvaluationOfMembers(Evaluation):
    """An evaluation of a population, whose members are the same here."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        model = make_model(kind, self.make_optimizer())
        values = self.evaluate(kind, model, [kind.pack(batch) for batch in batches])
        params = oracle.make_params(kind.dtype)
        expected = oracle.measure(self.make_rule(kind), params, oracle.join(batches))
        for name, value in expected.items():
            self.assert_close(kind, values[f"{name}[1]"], value)
            self.assert_close(kind, values[name], value)

    def evaluate(self, kind: Kind, model: Any, data: list[Any]) -> dict[str, Any]:
        population = Population(seeds=(0, 1))
        members = population.stack(lambda key: model)(key=jax.random.key(0))
        return self.make_engine(kind, population).evaluate(members, data)


class EvaluationByFunctions(Evaluation):
    """An evaluator whose losses are functions of the predictions."""

    def evaluate(self, kind: Kind, model: Any, data: list[Any]) -> dict[str, Any]:
        def compute_loss(name: str) -> Callable[[Any, Any, Any], Any]:
            return lambda preds, batch, mask: compute_terms(kind, preds, kind.unpack(batch), mask)[
                name
            ]

        names = ["loss", "example"] if kind is KINDS["three_terms"] else ["loss"]
        losses = {name: compute_loss(name) for name in names}
        if len(names) > 1:
            # The sum of the losses of an evaluator is `loss`.
            losses = {"tokens": losses["loss"], "example": losses["example"]}
        return self.make_engine(kind).evaluate(model, data, losses=losses)


class EvaluationInTraining(Evaluation):
    """An evaluation at the end of training."""

    def check(self, kind: Kind) -> None:
        batches = self.make_batches()
        data = [kind.pack(batch) for batch in batches]
        model = make_model(kind, self.make_optimizer())
        evaluator = Evaluator("test", data, every=fg.AtEnd())
        result = self.make_engine(kind, evaluator).fit(model, data)
        params = oracle.train(self.make_rule(kind), oracle.make_params(kind.dtype), batches).params
        expected = oracle.measure(self.make_rule(kind), params[-1], oracle.join(batches))
        values = result.metrics["test"]
        self.assert_close(kind, {name: values[name] for name in expected}, expected)
