"""Evaluators along training: when they run, what they see, where their results go, and how they
fail."""

import inspect
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluated import Act, Counting, Keeper, Logger, Logits, numbers
from fulgurite.errors import ConfigurationError, ModelError, NonFiniteError, PluginError, StateError
from fulgurite_evaluators import Evaluator, EveryCheckpoint, LastCheckpoint
from fulgurite_logging import media

ZERO = numbers([0])


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def fit(*plugins: Any, **settings: Any) -> fg.FitResult:
    return engine(*plugins, **{"steps": 4, **settings}).fit(Counting, ZERO)


def logits(right: list[int]) -> dict[str, np.ndarray]:
    """Examples of two classes, of which those marked 1 are classified right."""
    label = np.arange(len(right), dtype=np.int32) % 2
    return {
        "logits": np.eye(2, dtype=np.float32)[np.where(right, label, 1 - label)],
        "label": label,
    }


# --- cases with numbers ---------------------------------------------------------------------------


def test_accuracy_over_uneven_batches() -> None:
    batches = [logits([1, 1, 1, 1]), logits([1, 0])]
    result = engine(Evaluator("test", batches, every=1), steps=1).fit(Logits, batches[:1])
    assert result.metrics["test"]["accuracy"] == pytest.approx(5 / 6, rel=1e-6)


@pytest.mark.full
def test_snapshot_holds_the_metrics_of_its_own_step() -> None:
    """Of 0.36 and 0.36 one is best, of NaN, 0.5 and 1.0 the last: the checkpointer chooses, by
    these."""
    for values in ([0.36, 0.36], [np.nan, 0.5, 1.0]):
        keeper = Keeper(10)
        probe = Evaluator(
            "test",
            every=10,
            fn=lambda state, step, values=values: {"accuracy": values[step // 10 - 1]},
        )
        fit(probe, keeper, steps=10 * len(values))
        accuracies = [
            keeper.snapshots[step].metrics["test"]["accuracy"] for step in sorted(keeper.snapshots)
        ]
        np.testing.assert_array_equal(accuracies, values)


@pytest.mark.full
def test_an_evaluation_at_step_i_sees_i_updates() -> None:
    logger = Logger()
    trigger = fg.AtStart() | fg.At(1) | fg.Every(3) | fg.AtEnd()
    fit(Evaluator("test", ZERO, every=trigger), logger, steps=8)
    assert logger.values("test", "updates") == [(0, 0), (1, 1), (3, 3), (6, 6), (8, 8)]


def test_n_steps_are_n_updates_with_several_steps_per_execution() -> None:
    logger = Logger()
    fit(Evaluator("test", ZERO, every=3), logger, steps=8, steps_per_execution=4)
    assert logger.values("test", "updates") == [(3, 3), (6, 6)]


@pytest.mark.full
def test_one_result_at_the_start_of_a_run_that_was_killed_and_resumed() -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    keeper, logger = Keeper(100), Logger()
    evaluator = Evaluator("test", ZERO, every=fg.AtStart() | fg.AtEnd())
    with pytest.raises(Killed):
        fit(evaluator, keeper, logger, Act(500, kill), steps=600)
    assert max(keeper.snapshots) == 400
    engine(evaluator, keeper, logger, steps=600).fit(
        Counting, ZERO, resume=fg.CheckpointRef("memory")
    )
    assert logger.values("test", "updates") == [(0, 0), (600, 600)]


@pytest.mark.full
def test_no_result_at_the_end_before_the_planned_end() -> None:
    keeper, logger = Keeper(100), Logger()
    evaluator = Evaluator("test", ZERO, every=fg.AtEnd())
    terminate = Act(50, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = fit(evaluator, keeper, logger, terminate, steps=60)
    assert result.stop_reason == "SIGTERM" and logger.values("test", "updates") == []
    assert "test" not in result.metrics
    engine(evaluator, keeper, logger, steps=60).fit(
        Counting, ZERO, resume=fg.CheckpointRef("memory")
    )
    assert logger.values("test", "updates") == [(60, 60)]


# --- where results go -----------------------------------------------------------------------------


def test_results_reach_loggers_the_result_history_and_plugins() -> None:
    calls: list[Any] = []

    class Listener:
        @fg.hookimpl
        def on_evaluate_end(self, run: fg.Run, source: str, metrics: dict[str, Any]) -> None:
            calls.append((run.step, source, metrics, run.metrics[source]))

    logger = Logger()
    result = fit(Evaluator("a", ZERO, every=2), Evaluator("b", ZERO, every=4), logger, Listener())
    expected = [(2, "a", -2.0), (4, "a", -4.0), (4, "b", -4.0)]
    assert [(step, name, metrics["loss"]) for step, name, metrics, _ in calls] == expected
    assert all(metrics == newest for *_, metrics, newest in calls)
    assert [
        (record.step, record.source, record.values["loss"])
        for record in logger.exact
        if record.source != "train"
    ] == expected
    assert result.metrics["a"] == result.metrics["b"] == {"loss": -4.0, "updates": 4.0}
    assert result.history["a/loss"].tolist() == [-2, -4]
    assert result.timings.calls["evaluate.a"] == 2 and result.timings.calls["evaluate.b"] == 1


def test_evaluation_triggered_by_time_is_telemetry() -> None:
    logger = Logger()
    fit(Evaluator("test", ZERO, every=fg.Every(2) | fg.EverySeconds(1000)), logger)
    assert [record.step for record in logger.telemetry if record.source == "test"] == [2, 4]
    assert all(record.source == "train" for record in logger.exact)


@pytest.mark.full
def test_metrics_and_losses_of_an_evaluator_replace_those_of_the_module() -> None:
    arrays = logits([1, 0, 0, 1, 1])
    mistakes = {"wrong": lambda preds, batch: preds.argmax(-1) != batch["label"]}
    absolute = {
        "l1": lambda preds, batch: jnp.abs(preds[:, 0] - batch["label"]),
        "twice": lambda preds, batch: 2 * jnp.abs(preds[:, 0] - batch["label"]),
    }
    data = fg.ArrayData(arrays, 4, remainder="pad")
    plugins = [
        Evaluator("own", data, 1, metrics=mistakes),
        Evaluator("loss", data, 1, losses=absolute),
        Evaluator("both", data, 1, metrics=mistakes, losses=absolute),
        Evaluator("plain", data, 1),
    ]
    metrics = engine(*plugins, steps=1).fit(Logits, data).metrics
    l1 = np.abs(arrays["logits"][:, 0] - arrays["label"]).mean()
    assert metrics["plain"].keys() == {"loss", "accuracy"}
    assert metrics["own"] == {"loss": metrics["plain"]["loss"], "wrong": pytest.approx(0.4)}
    losses = {
        "loss": pytest.approx(3 * l1),
        "l1": pytest.approx(l1),
        "twice": pytest.approx(2 * l1),
    }
    assert metrics["loss"] == {**losses, "accuracy": metrics["plain"]["accuracy"]}
    assert metrics["both"] == {**losses, "wrong": pytest.approx(0.4)}


@pytest.mark.full
def test_loss_is_the_sum_of_terms_with_different_weights() -> None:
    """Over both batches (1 + 2 * 3 + 5 * 10 + 7) / 15; the means of each would be 7/4 and 57/11."""

    class Given(Logits):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(preds=batch["x"])

    batches = [
        {"x": np.asarray(x, np.float32), "n": np.asarray(n, np.float32)}
        for x, n in (([1, 2], [1, 3]), ([5, 7], [10, 1]))
    ]
    kind: Any = Given
    module = kind()
    weighted = {"nll": lambda preds, batch: fg.metrics.Mean.from_values(preds, weight=batch["n"])}
    metrics = engine().evaluate(module, batches, losses=weighted)
    assert metrics == {"nll": pytest.approx(64 / 15), "loss": pytest.approx(64 / 15)}
    both = engine().evaluate(
        module, batches, losses={**weighted, "loss": lambda preds, batch: preds}
    )
    assert both["loss"] == pytest.approx(64 / 15 + 15 / 4)
    stands = engine().evaluate(
        module, batches, losses=weighted, metrics={"loss": lambda preds, batch: preds}
    )
    assert stands == {"nll": pytest.approx(64 / 15), "loss": pytest.approx(15 / 4)}


def test_metric_functions_may_be_unhashable() -> None:
    @dataclass
    class Over:
        threshold: float

        def __call__(self, preds: Any, batch: Any) -> Any:
            return preds[:, 1] > self.threshold

    over = {f"over_{threshold}": Over(threshold) for threshold in (0.5, 2.0)}
    arrays = logits([1, 0, 0, 1])
    results = engine().evaluate(Logits(), [arrays], metrics=over)
    assert (results["over_0.5"], results["over_2.0"]) == (arrays["logits"][:, 1].mean(), 0)
    for nothing in (None, "right"):
        with pytest.raises(ModelError, match="metric 'accuracy' is .*, which is neither a number"):
            engine().evaluate(
                Logits(),
                [arrays],
                metrics={"accuracy": lambda preds, batch, nothing=nothing: nothing},
            )
    bad: Any = ["accuracy"]
    worse: Any = {"accuracy": 3}
    for metrics in (bad, worse):
        with pytest.raises(
            ConfigurationError,
            match="evaluator 'test': metrics must be a dictionary of functions, not",
        ):
            engine().evaluate(Logits(), [arrays], metrics=metrics)


def test_num_batches_and_evaluations_of_a_data_module() -> None:
    @dataclass
    class Parts:
        train: Any
        evaluations: dict[str, Any]

    data = Parts(ZERO, {"some": numbers([1], [3], [8])})
    mean = {"mean": lambda preds, batch: preds}
    plugin = Evaluator("some", data, 1, num_batches=2, metrics=mean)
    assert engine(plugin, steps=1).fit(Counting, data).metrics["some"]["mean"] == 2


# --- what an evaluation is ------------------------------------------------------------------------


class Noisy(Counting):
    """Draws a number, applies dropout, and counts in its state the batches that it has seen."""

    drop: eqx.nn.Dropout
    counter: eqx.nn.StateIndex

    def __init__(self, *, key: Any = None) -> None:
        super().__init__()
        self.drop, self.counter = eqx.nn.Dropout(0.5), eqx.nn.StateIndex(jnp.zeros(()))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.model_state is not None
        counter = ctx.model_state.get(self.counter)
        state = ctx.model_state.set(self.counter, counter + 1)
        metrics = {
            "noise": jax.random.uniform(ctx.key()),
            "kept": self.drop(jnp.ones(100), key=ctx.key()).mean(),
            "seen": counter,
        }
        return fg.Output(self.weight * 1.0, metrics=metrics, model_state=state)


@pytest.mark.full
def test_noise_repeats_unless_it_is_to_be_fresh_dropout_is_off_and_the_model_state_read_only() -> (
    None
):
    logger, data = Logger(), numbers([0], [0])
    plugins = [
        Evaluator("same", data, 1),
        Evaluator("other", data, 1),
        Evaluator("fresh", data, 1, new_rng_each_time=True),
        logger,
    ]
    result = engine(*plugins, steps=3).fit(eqx.nn.make_with_state(Noisy), data)
    noise = {
        name: [value for _, value in logger.values(name, "noise")]
        for name in ("same", "other", "fresh")
    }
    assert (
        len(set(noise["same"])) == len(set(noise["other"])) == 1 and noise["same"] != noise["other"]
    )
    assert len(set(noise["fresh"])) == 3
    assert [value for _, value in logger.values("same", "kept")] == [1, 1, 1]
    assert logger.values("same", "seen") == [(1, 1), (2, 2), (3, 3)]
    assert (
        result.model_state is not None and float(result.model_state.get(result.module.counter)) == 3
    )


@pytest.mark.full
def test_one_program_for_each_evaluator_and_no_bit_of_training_changed() -> None:
    traced: list[str] = []

    class Traced(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            traced.append("evaluation")
            return self.training_step(batch, ctx)

    data = numbers([0, 1], [2, 3])
    engine(Evaluator("a", data, 1), steps=1).fit(Traced, data)
    once = len(traced)
    loud = engine(Evaluator("a", data, 1), steps=6).fit(Traced, data)
    assert len(traced) == 2 * once
    quiet = engine(steps=6).fit(Traced, data)
    assert loud.module.weight.tobytes() == quiet.module.weight.tobytes()
    np.testing.assert_array_equal(loud.history["train/loss"], quiet.history["train/loss"])


def test_module_view_selects_the_weights() -> None:
    class Views:
        @fg.hookimpl
        def module_views(self, state: fg.TrainState) -> Any:
            return {"doubled": jax.tree.map(lambda leaf: 2 * leaf, state.module)}

    evaluator = Evaluator(
        "seen", module_view="doubled", fn=lambda state, step: {"weight": state.module.weight}
    )
    result = fit(
        Evaluator("now", ZERO), Evaluator("twice", ZERO, module_view="doubled"), evaluator, Views()
    )
    assert (result.metrics["now"]["updates"], result.metrics["twice"]["updates"]) == (4, 8)
    assert result.metrics["seen"] == {"weight": -8}


# --- evaluations of another kind ------------------------------------------------------------------


def test_subclass_overrides_evaluate_and_may_call_super() -> None:
    class Doubled(Evaluator):
        def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
            standard = super().evaluate(state, step)
            return {
                "twice": 2 * standard["updates"],
                "step": step,
                "of": {"weight": state.module.weight},
            }

    logger = Logger()
    result = fit(Doubled("test", ZERO, 2), logger)
    assert logger.values("test", "twice") == [(2, 4), (4, 8)]
    assert result.metrics["test"] == {"twice": 8, "step": 4, "of/weight": -4}


@pytest.mark.full
def test_a_function_is_called_with_a_state_in_inference_mode() -> None:
    def probe(state: fg.TrainState, step: int) -> dict[str, Any]:
        assert not fg.is_training() and not jax.jit(fg.is_training)()
        assert (
            state.module.drop.inference and not state.module.drop(jnp.ones(9), key=None).max() > 1
        )
        return {"step": step, "updates": -state.module.weight, "row": np.arange(3)}

    result = engine(Evaluator("probe", every=2, fn=probe), steps=3).fit(
        eqx.nn.make_with_state(Noisy), ZERO
    )
    row = result.metrics["probe"].pop("row")
    assert result.metrics["probe"] == {"step": 2, "updates": 2.0} and row.tolist() == [0, 1, 2]


def test_custom_evaluation_returning_something_else_is_an_error() -> None:
    with pytest.raises(
        PluginError, match=r"'probe' returned 3; an evaluation returns metrics by name"
    ):
        fit(Evaluator("probe", fn=lambda state, step: 3))  # type: ignore[arg-type,return-value]


@pytest.mark.full
def test_media_of_a_custom_evaluation_are_logged_and_its_metrics_are_numbers() -> None:
    records: list[fg.Record] = []

    class MediaLog:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "media":
                return
            records.append(record)

    def show(state: fg.TrainState, step: int) -> dict[str, Any]:
        picture = media.Image.from_pixels(jnp.ones((2, 3)))
        return {"a": 1.5, "enc": {"picture": picture, "later": lambda: media.Text("a note")}}

    result = fit(Evaluator("test", every=2, fn=show), MediaLog())
    assert result.metrics["test"] == {"a": 1.5}
    assert [(record.source, record.step) for record in records] == [("test", 2), ("test", 4)]
    assert records[0].values["enc/later"] == media.Text("a note")
    assert records[0].values["enc/picture"].pixels.tolist() == [[[255]] * 3] * 2
    with pytest.raises(PluginError, match="metric 'a' of evaluator 'test' is str"):
        fit(Evaluator("test", fn=lambda state, step: {"a": "a"}))


def test_evaluate_outside_of_an_evaluation_is_an_error() -> None:
    evaluator = Evaluator("test", ZERO)
    state = engine(steps=1).fit(Counting, ZERO).state
    with pytest.raises(StateError, match="called during an evaluation only"):
        evaluator.evaluate(state, 1)


def test_super_evaluate_without_data_is_an_error() -> None:
    class Standard(Evaluator):
        def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
            return super().evaluate(state, step)

    with pytest.raises(ConfigurationError, match="evaluator 'test' has no data"):
        fit(Standard("test"))


def test_custom_evaluation_with_a_module_view_may_call_super() -> None:
    class Views:
        @fg.hookimpl
        def module_views(self, state: fg.TrainState) -> Any:
            return {"doubled": jax.tree.map(lambda leaf: 2 * leaf, state.module)}

    class Standard(Evaluator):
        def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
            return super().evaluate(state, step)

    result = fit(Standard("test", ZERO, module_view="doubled"), Views())
    assert result.metrics["test"]["updates"] == 8


# --- failures -------------------------------------------------------------------------------------


@dataclass
class Failing:
    """Data that fails from the second evaluation on."""

    num_good: int
    begun: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[np.ndarray]:
        self.begun.append(0)
        if len(self.begun) > self.num_good:
            raise OSError("the disk is gone")
        return iter(ZERO)


def test_a_failure_names_evaluator_and_step_and_ends_training() -> None:
    with pytest.raises(OSError, match="the disk is gone") as caught:
        # One more pass is the check at the start.
        fit(Evaluator("test", Failing(2), every=2), steps=8)
    notes = "\n".join(caught.value.__notes__)
    assert (
        "evaluator 'test', step 4" in notes
        and "plugin 'evaluator:test' (fulgurite-evaluators" in notes
    )


def test_failed_evaluator_with_raise_on_error_false_is_left_out_with_one_warning() -> None:
    logger, keeper = Logger(), Keeper(8)
    plugins = [
        Evaluator("test", Failing(1), every=2, raise_on_error=False),
        Evaluator("other", ZERO, every=4),
        logger,
        keeper,
    ]
    with pytest.warns(
        UserWarning, match="evaluator 'test' failed and runs no more: OSError: the disk is gone"
    ) as caught:
        result = fit(*plugins, steps=8)
    assert len(caught) == 1
    assert logger.values("test", "updates") == [(2, 2)] and logger.values("other", "updates") == [
        (4, 4),
        (8, 8),
    ]
    assert (
        result.failures.keys() == {"evaluate.test"} and "step 4" in result.failures["evaluate.test"]
    )
    assert [
        record.step for record in logger.text if "runs no more" in record.values["message"]
    ] == [4]
    assert (
        "test" not in keeper.snapshots[8].metrics and "test" not in result.metrics
    )  # step 2's are not those of step 8


def test_nonfinite_state_is_not_a_failure_of_the_evaluator() -> None:
    class Exploding(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.where(ctx.step == 2, jnp.nan, 1.0) * self.weight)

    with pytest.raises(NonFiniteError, match="step 3"):
        engine(Evaluator("test", ZERO, 3, raise_on_error=False), steps=4).fit(Exploding, ZERO)


@pytest.mark.full
def test_interrupted_evaluation_is_not_a_failure_and_is_repeated_on_resume() -> None:
    @dataclass
    class Terminating:
        armed: bool = True

        def __iter__(self) -> Iterator[np.ndarray]:
            for _ in range(3):
                yield ZERO[0]
                if self.armed:
                    self.armed = False
                    os.kill(os.getpid(), signal.SIGTERM)

    keeper, logger = Keeper(2), Logger()
    evaluator = Evaluator(
        "test", fg.DataSource(Terminating(), prefetch=0), every=2, raise_on_error=False
    )
    result = fit(evaluator, keeper, logger)
    assert (result.stop_reason, result.failures, logger.values("test", "updates")) == (
        "SIGTERM",
        {},
        [],
    )
    engine(evaluator, keeper, logger, steps=4).fit(
        Counting, ZERO, resume=fg.CheckpointRef("memory")
    )
    assert logger.values("test", "updates") == [(2, 2), (4, 4)]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "train", "two words", 3])
def test_name_that_cannot_be_a_file_name_is_an_error(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="a name is letters, digits"):
        Evaluator(name, ZERO)


def test_invalid_arguments_of_an_evaluator_are_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match="'fast' has no meaning: give it every=EveryCheckpoint"
    ):
        Evaluator("test", ZERO, every=2, group="fast")
    with pytest.raises(ConfigurationError, match="nothing to evaluate"):
        Evaluator("test")
    with pytest.raises(ConfigurationError, match="num_batches is 0"):
        Evaluator("test", ZERO, num_batches=0)
    bad: Any = "3"
    with pytest.raises(ConfigurationError, match="num_batches is '3'"):
        Evaluator("test", ZERO, num_batches=bad)
    with pytest.raises(ConfigurationError, match="fn is '3'"):
        Evaluator("test", fn=bad)
    bad = None
    with pytest.raises(ConfigurationError, match="module_view is None"):
        Evaluator("test", ZERO, module_view=bad)
    with pytest.raises(
        ConfigurationError, match="evaluator 'test': losses must be a dictionary of functions"
    ):
        Evaluator("test", ZERO, losses={"mse": bad})
    with pytest.raises(ConfigurationError, match="group 'a/b'"):
        Evaluator("test", ZERO, every=EveryCheckpoint(), group="a/b")
    bad = 3
    with pytest.raises(ConfigurationError, match="group 3"):
        Evaluator("test", ZERO, every=EveryCheckpoint(), group=bad)
    bad = "1"
    for poll in (0, bad):
        with pytest.raises(ConfigurationError, match=f"EveryCheckpoint: poll is {poll!r}"):
            EveryCheckpoint(poll=poll)
    with pytest.raises(PluginError, match="two plugins are called 'evaluator:test'"):
        engine(Evaluator("test", ZERO), Evaluator("test", ZERO))


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda **names: Evaluator("test", **names), {"run": "give every=", "ds": "second"}),
        (lambda **names: Evaluator("test", ZERO, **names), {"job_group": "give group="}),
        (EveryCheckpoint, {"job_group": r"Evaluator\('slow', data, group='side'\)"}),
        (LastCheckpoint, {"group": r"Evaluator\('slow', data, group='side'\)"}),
    ],
)
def test_arguments_of_other_evaluators_get_a_hint(make: Any, hint: dict[str, str]) -> None:
    for name, text in hint.items():
        with pytest.raises(ConfigurationError, match=f"has no argument '{name}': .*{text}"):
            make(**{name: "x"})
    with pytest.raises(TypeError, match="no_such"):
        make(no_such=1)
    assert "job_group" not in str(inspect.signature(Evaluator))
    assert list(inspect.signature(EveryCheckpoint).parameters) == ["poll"]


def test_training_ignores_standalone_evaluators() -> None:
    def data() -> Iterator[np.ndarray]:
        raise AssertionError("training evaluates nothing here")
        yield

    plugins = [
        Evaluator("every", data(), every=EveryCheckpoint()),
        Evaluator("last", data(), every=LastCheckpoint()),
    ]
    trainer = engine(*plugins, steps=2)
    assert trainer.fit(Counting, ZERO).metrics.keys() == {"train"}
    assert list(trainer.evaluations) == ["every", "last"] and [
        plugin.group for plugin in plugins
    ] == [
        "default",
        "default",
    ]


def test_evaluator_selected_by_name() -> None:
    trainer = engine({"evaluator": {"name": "test", "data": ZERO, "every": 2}}, steps=2)
    assert trainer.fit(Counting, ZERO).metrics["test"]["updates"] == 2
