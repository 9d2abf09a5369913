"""The columns of the table: what a user adds to training, each with what the oracle does instead.

`check_pair` runs one pair of a feature and a kind of loss, and compares weights and losses with
those of the oracle.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal

import fulgurite as fg
import jax
import numpy as np
import optax
import oracle
import pytest
from fulgurite.errors import DataError, FulguriteError, ModelError
from fulgurite_averaging import EMA, Average, Mean
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_lora import Lora
from fulgurite_optimizers import Freeze, GradientAccumulation, GradientClip, MultiOptimizer, Phase
from fulgurite_population import Population
from fulgurite_precision import Dynamic, Precision
from fulgurite_sam import Sam
from fulgurite_sharding import FSDP, DataParallel
from kinds import (
    KINDS,
    FunctionModel,
    Kind,
    Model,
    compute_terms,
    get_params,
    get_weights,
    make_model,
)

PROBE = False
"""Whether bare numbers that are no means over examples are refused by accumulation and told of by
evaluations. Until then, these pairs are left out."""

PROBE_MESSAGE = "mean"
"""What the message says then."""

WAITS_FOR_MERGE: Sequence[tuple[str, str]] = [
    ("*", "complex"),
    # A loss that is a Mean beside a bare term: a KeyError.
    ("*_functions", "three_terms"),
    ("evaluate_phases", "three_terms"),
    # A population without a bare number: a ValueError of vmap.
    ("evaluate_members", "tokens_keys"),
    # Plugins are asked for the terms of all members at once, whose weights are stacked.
    ("evaluate_members", "three_terms"),
    # The mean loss of the members lacks the weight that theirs have: refused, if nothing is wrong.
    ("evaluate_members", "foreign_weight"),
]
"""Pairs, as patterns, that depend on what is mended elsewhere."""

TOLERANCES = {
    "float32": (2e-5, 2e-6),
    "complex64": (5e-5, 5e-6),
    "float16": (5e-3, 2e-3),
    "bfloat16": (3e-2, 1e-2),
}
"""Relative and absolute, by the coarsest dtype that takes part; from fine to coarse."""

EVEN = (8, 8, 8)
UNEVEN = (8, 8, 8, 8, 4)

Outcome = Literal["equal", "refused", "told"]


@dataclass(frozen=True)
class Expectation:
    """What should become of a pair.

    Attributes:
        outcome: equal to the oracle, refused by an error, or told of by a warning.
        error: the class of the error.
        message: a pattern that the error or the warning has.
    """

    outcome: Outcome
    error: type[FulguriteError] = FulguriteError
    message: str = ""


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
        optimizer = self.make_optimizer()
        population = Population(seeds=(0, 1))
        engine = self.make_engine(kind, population)
        members = population.stack(lambda key: make_model(kind, optimizer))(key=jax.random.key(0))
        values = engine.evaluate(members, [kind.pack(batch) for batch in batches])
        params = oracle.make_params(kind.dtype)
        expected = oracle.measure(self.make_rule(kind), params, oracle.join(batches))
        for name, value in expected.items():
            self.assert_close(kind, values[f"{name}[1]"], value)
            self.assert_close(kind, values[name], value)


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


PHASES = ("body", "head")


def make_phases(
    *, order: Any = "alternating", accumulate: Any = None, rate: float = oracle.RATE
) -> MultiOptimizer:
    """Return two optimizers, each of a part of the model.

    Args:
        order: of their updates.
        accumulate: of each.
        rate: of both.
    """
    phases = {
        name: Phase(optax.sgd(rate, momentum=oracle.MOMENTUM), name, accumulate=accumulate)
        for name in PHASES
    }
    return MultiOptimizer(order=order, **phases)


def make_averages() -> list[Any]:
    return [Average(EMA(0.5)), Average(Mean(), name="mean")]


IN_STEPS: Mapping[str, Any] = {"num_joined": 2, "splits": "steps"}
"""Two updates: of two steps, and of the step that is left."""

IN_PARTS: Mapping[str, Any] = {"splits": "microbatch"}

TRAINING: Mapping[str, Feature] = {
    "plain": Feature(sizes=(8, 8, 4)),
    "adam": Feature(rule={"adam": True}),
    "phases_alternating": Feature(lambda: [make_phases()], rule={"order": PHASES}, phases=PHASES),
    "phases_simultaneous": Simultaneous(
        lambda: [make_phases(order="simultaneous")],
        rule={"order": PHASES, "simultaneous": True},
        phases=PHASES,
    ),
    "phases_functions": Feature(
        lambda: [make_phases()],
        rule={"order": PHASES},
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
    ),
    "phases_sam": Feature(
        lambda: [make_phases(), Sam(radius=0.1)],
        rule={"order": PHASES, "radius": 0.1},
        phases=PHASES,
    ),
    "repeat_split": Repeated(
        lambda: [
            MultiOptimizer(
                loss=Phase(optax.sgd(oracle.RATE, momentum=oracle.MOMENTUM), repeat=2, split=True)
            )
        ],
        splits="microbatch",
    ),
    "precision_bf16": Feature(
        lambda: [Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
    ),
    "precision_fp16": Feature(
        lambda: [Precision("fp16", scale=Dynamic(initial=1024.0))],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
    ),
    "averages": Averaging(make_averages),
    "clip": Feature(lambda: [GradientClip(max_norm=0.5)], rule={"clip": 0.5}),
    "freeze": Feature(lambda: [Freeze("body")], rule={"trained": ("head",)}),
    "lora": Adapters(
        lambda: [Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
    ),
    "sam": Feature(lambda: [Sam(radius=0.1)], rule={"radius": 0.1}),
    "population": Members(),
    "window": Window(sizes=UNEVEN, averages=True, settings={"log_every": 3}),
}

DIVIDED: Mapping[str, Feature] = {
    "microbatches": Feature(lambda: [GradientAccumulation(2)], sizes=(8, 8, 4), **IN_PARTS),
    "microbatches_clip": Feature(
        lambda: [GradientAccumulation(2), GradientClip(max_norm=0.5)],
        rule={"clip": 0.5},
        **IN_PARTS,
    ),
    "microbatches_bf16": Feature(
        lambda: [GradientAccumulation(2), Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
        **IN_PARTS,
    ),
    "microbatches_fp16": Feature(
        lambda: [GradientAccumulation(2), Precision("fp16", scale=Dynamic(initial=1024.0))],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
        **IN_PARTS,
    ),
    "microbatches_averages": Averaging(
        lambda: [GradientAccumulation(2), *make_averages()], **IN_PARTS
    ),
    "microbatches_freeze": Feature(
        lambda: [GradientAccumulation(2), Freeze("body")], rule={"trained": ("head",)}, **IN_PARTS
    ),
    "microbatches_lora": Adapters(
        lambda: [GradientAccumulation(2), Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
        **IN_PARTS,
    ),
    "microbatches_sam": Feature(
        lambda: [GradientAccumulation(2), Sam(radius=0.1)],
        rule={"radius": 0.1, "parts": 2},
        **IN_PARTS,
    ),
    "microbatches_population": Members(lambda: [GradientAccumulation(2)], **IN_PARTS),
    "microbatches_window": Window(
        lambda: [GradientAccumulation(2)],
        sizes=(8, 8, 8, 8),
        splits="microbatch",
        settings={"log_every": 3},
    ),
    "microbatches_phases": Feature(
        lambda: [make_phases(accumulate=GradientAccumulation(2))],
        rule={"order": PHASES},
        phases=PHASES,
        **IN_PARTS,
    ),
    "microbatches_functions": Feature(
        lambda: [make_phases(accumulate=GradientAccumulation(2))],
        rule={"order": PHASES},
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
        **IN_PARTS,
    ),
    "steps_changing": Feature(
        lambda: [GradientAccumulation({0: 1, 2: 2}, "steps")],
        sizes=(8,) * 5,
        num_joined=(1, 1, 2, 1),
        splits="steps",
    ),
    "steps": Feature(lambda: [GradientAccumulation(2, "steps")], sizes=UNEVEN, **IN_STEPS),
    "steps_adam": Feature(
        lambda: [GradientAccumulation(2, "steps")], rule={"adam": True}, **IN_STEPS
    ),
    "steps_clip": Feature(
        lambda: [GradientAccumulation(2, "steps"), GradientClip(max_norm=0.5)],
        rule={"clip": 0.5},
        **IN_STEPS,
    ),
    "steps_bf16": Feature(
        lambda: [GradientAccumulation(2, "steps"), Precision("bf16")],
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
        **IN_STEPS,
    ),
    "steps_fp16": Feature(
        lambda: [
            GradientAccumulation(2, "steps"),
            Precision("fp16", scale=Dynamic(initial=1024.0)),
        ],
        rule={"compute": "float16"},
        dtype="float16",
        settings={"on_nonfinite": "skip"},
        leaves_out=["half", "complex"],
        **IN_STEPS,
    ),
    "steps_averages": Averaging(
        lambda: [GradientAccumulation(2, "steps"), *make_averages()], **IN_STEPS
    ),
    "steps_lora": Adapters(
        lambda: [GradientAccumulation(2, "steps"), Lora("body", rank=2, scale=2.0)],
        rule={"trained": ("down", "up")},
        leaves_out=["complex"],
        **IN_STEPS,
    ),
    "steps_population": Members(lambda: [GradientAccumulation(2, "steps")], **IN_STEPS),
    "steps_phases": Simultaneous(
        lambda: [make_phases(order="simultaneous", accumulate=GradientAccumulation(2, "steps"))],
        rule={"order": PHASES, "simultaneous": True},
        phases=PHASES,
        **IN_STEPS,
    ),
    "steps_resume": Resume(lambda: [GradientAccumulation(2, "steps")], sizes=UNEVEN, **IN_STEPS),
}

EVALUATION: Mapping[str, Feature] = {
    "evaluate": Evaluation(sizes=(8, 8, 4, 1), averages=True),
    "evaluate_one_by_one": Evaluation(sizes=(1,) * 6, averages=True),
    "evaluate_members": EvaluationOfMembers(sizes=(8, 8, 4), averages=True),
    "evaluate_phases": EvaluationOfPhases(
        sizes=(8, 8, 4),
        averages=True,
        phases=PHASES,
        model_class=FunctionModel,
        leaves_out=["tokens_keys"],
    ),
    "evaluate_functions": EvaluationByFunctions(
        sizes=(8, 8, 4),
        averages=True,
        leaves_out=["tokens_keys", "*_weight", "complex", "foreign_*", "three_terms"],
    ),
    "evaluate_in_training": EvaluationInTraining(sizes=(8, 8, 4), averages=True),
    "evaluate_bf16": Evaluation(
        lambda: [Precision("bf16")],
        sizes=(8, 8, 4),
        averages=True,
        rule={"compute": "bfloat16"},
        dtype="bfloat16",
        leaves_out=["half", "complex"],
    ),
}

ON_EIGHT: Mapping[str, Feature] = {
    "data_parallel": Feature(lambda: [DataParallel()], num_devices=8, sizes=(8, 8, 16)),
    "fsdp": Feature(lambda: [FSDP(min_size=1)], num_devices=8, sizes=(8, 8, 16)),
    "fsdp_microbatches": Feature(
        lambda: [FSDP(min_size=1), GradientAccumulation(2)],
        num_devices=8,
        sizes=(16, 16, 32),
        splits="microbatch",
    ),
    "fsdp_steps": Feature(
        lambda: [FSDP(min_size=1), GradientAccumulation(2, "steps")],
        num_devices=8,
        sizes=(8, 8, 16),
        num_joined=2,
        splits="steps",
    ),
    "fsdp_evaluate": Evaluation(
        lambda: [FSDP(min_size=1)], num_devices=8, sizes=(8, 8, 16), averages=True
    ),
}
"""These need eight devices."""

FEATURES: Mapping[str, Feature] = {**TRAINING, **DIVIDED, **EVALUATION, **ON_EIGHT}


COMPLETE = ("plain", "window", "microbatches", "steps", "evaluate", "data_parallel")
"""Features that are crossed with every kind."""

SIMILAR = ("tokens_computed", "weights_mean", "tuple", "deviation")
"""Kinds that the others leave out: a step sees of them what it sees of others."""


def expect(feature: Feature, kind: Kind) -> Expectation | None:
    """Return what should become of a pair; None if it is not known yet."""
    divides = "does not divide into 8 parts|cannot be split"
    if not kind.has_count:
        return Expectation("refused", DataError, f"begin with different lengths|{divides}")
    if not kind.can_split and feature.num_devices > 1 and not feature.averages:
        return Expectation("refused", DataError, divides)
    if not kind.can_split and feature.splits == "microbatch":
        return Expectation("refused", DataError, "cannot be split")
    if kind is KINDS["three_terms"] and feature.splits == "steps":
        return Expectation("refused", ModelError, "different weights")
    if kind.is_mean or not (feature.splits or feature.averages):
        return Expectation("equal")
    if not PROBE:
        return None
    if feature.splits:
        return Expectation("refused", ModelError, PROBE_MESSAGE)
    return Expectation("told", message=PROBE_MESSAGE)


def list_pairs(features: Mapping[str, Feature]) -> list[tuple[str, str]]:
    """Return all pairs of the table by the names of feature and kind."""
    return [
        (feature_name, kind_name)
        for feature_name, feature in features.items()
        for kind_name, kind in KINDS.items()
        if expect(feature, kind) is not None
        and (feature_name in COMPLETE or kind_name not in SIMILAR)
        and not any(fnmatch(kind_name, pattern) for pattern in feature.leaves_out)
        and not any(
            fnmatch(feature_name, first) and fnmatch(kind_name, second)
            for first, second in WAITS_FOR_MERGE
        )
    ]


def check_pair(feature_name: str, kind_name: str) -> Outcome:
    """Check one pair, and return what became of it."""
    feature = FEATURES[feature_name]
    kind = KINDS[kind_name]
    expectation = expect(feature, kind)
    assert expectation is not None
    if expectation.outcome == "equal":
        feature.check(kind)
    elif expectation.outcome == "refused":
        with pytest.raises(expectation.error, match=expectation.message):
            feature.check(kind)
    else:
        check_told(feature, kind, expectation.message)
    return expectation.outcome


def check_told(feature: Feature, kind: Kind, message: str) -> None:
    """Check that a warning or a message of the run says that a number means little.

    Args:
        feature: that averages such numbers.
        kind: whose loss is no mean.
        message: what it says.
    """
    data = [kind.pack(batch) for batch in feature.make_batches()]
    model = make_model(kind, feature.make_optimizer(), feature.phases, feature.model_class)
    engine = feature.make_engine(kind)
    if type(feature) in (Evaluation, EvaluationByFunctions):
        assert isinstance(feature, Evaluation)
        with pytest.warns(UserWarning, match=message):
            feature.evaluate(kind, model, data)
        return
    if isinstance(feature, EvaluationInTraining):
        engine = feature.make_engine(kind, Evaluator("test", data, every=fg.AtEnd()))
    messages = engine.fit(model, data).messages
    assert any(message in text for text in messages), messages
