"""Evaluation and prediction, against NumPy over all examples at once."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError, ModelError, PluginError
from models import (
    Act,
    Classifier,
    Counting,
    Evaluating,
    Kept,
    Linear,
    classes,
    init_module,
    numbers,
    regression,
)
from sklearn.metrics import average_precision_score


class Precision(fg.metrics.CollectingMetric):
    """The average precision, over all examples at once."""

    scores: Any
    labels: Any

    def compute(self) -> Any:
        labels = self.labels[self.mask]
        return average_precision_score(labels, self.scores[self.mask]) if labels.any() else np.nan


class Measuring(fg.Module):
    """Logits of two classes, with metrics of every kind."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.asarray([0.5, -1.0, 2.0])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logit = batch["x"] @ self.weight
        loss = optax.sigmoid_binary_cross_entropy(logit, batch["y"])
        logits = jnp.stack([jnp.zeros_like(logit), logit], -1)
        metrics = {
            "error": fg.metrics.Mean.from_values(loss, ctx.mask),
            "accuracy": fg.metrics.Accuracy.from_logits(logits, batch["y"].astype(int), ctx.mask),
            "largest": fg.metrics.Max.from_values(logit, ctx.mask),
            "least": fg.metrics.Min.from_values(logit, ctx.mask),
            "deviation": fg.metrics.Std.from_values(logit, ctx.mask),
            "total": fg.metrics.Sum.from_values(logit, ctx.mask),
            "bare": jnp.mean(logit, where=ctx.mask),
        }
        return fg.Output(jnp.mean(loss, where=ctx.mask), metrics=metrics, preds=logit)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = self.training_step(batch, ctx)
        mask = jnp.ones(len(batch["y"]), bool) if ctx.mask is None else ctx.mask
        gathered = {
            "precision": Precision(mask, output.preds, batch["y"]),
            "all": Kept(mask, {"logit": output.preds}),
        }
        return output.replace(metrics=output.metrics | gathered)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@dataclass
class Padded:
    """Batches of four examples, the last one filled up with NaN."""

    arrays: dict[str, np.ndarray]

    def __iter__(self) -> Any:
        for start in range(0, len(self.arrays["y"]), 4):
            part = {name: array[start : start + 4] for name, array in self.arrays.items()}
            missing = 4 - len(part["y"])
            filled = {
                name: np.concatenate(
                    [array, np.full((missing, *array.shape[1:]), np.nan, array.dtype)]
                )
                for name, array in part.items()
            }
            yield fg.Batch(filled, np.arange(4) < 4 - missing)


def examples() -> dict[str, np.ndarray]:
    x = regression(11).arrays["x"]
    return {"x": x, "y": (np.arange(11) % 3 == 0).astype(np.float32)}


SOURCES = {
    "keep": lambda arrays: fg.ArrayData(arrays, 4),
    "pad": lambda arrays: fg.ArrayData(arrays, 4, remainder="pad"),
    "one": lambda arrays: [arrays],
    "on the device": lambda arrays: fg.ArrayData(arrays, 4, remainder="pad", on_device=True),
    "NaN": Padded,
    "iterator": lambda arrays: iter(fg.ArrayData(arrays, 4)),
    "shuffled": lambda arrays: fg.ArrayData(arrays, 4, shuffle=True),
}


@pytest.mark.variants("full")
@pytest.mark.parametrize("source", SOURCES)
def test_metrics_are_exact_over_uneven_batches(source: str) -> None:
    arrays = examples()
    logit = arrays["x"].astype(np.float64) @ [0.5, -1.0, 2.0]
    loss = np.logaddexp(0, logit) - arrays["y"] * logit
    expected = {
        "loss": loss.mean(),
        "error": loss.mean(),
        "accuracy": np.mean((logit > 0) == (arrays["y"] > 0)),
        "largest": logit.max(),
        "least": logit.min(),
        "deviation": logit.std(),
        "total": logit.sum(),
        "bare": logit.mean(),
        "precision": average_precision_score(arrays["y"], logit),
    }
    metrics = fg.Engine().evaluate(Measuring(), SOURCES[source](arrays))
    gathered = metrics.pop("all/logit")
    assert metrics == pytest.approx(expected, rel=2e-6)
    assert all(type(value) is float for value in metrics.values())
    if source == "shuffled":
        gathered, logit = np.sort(gathered), np.sort(logit)
    np.testing.assert_allclose(gathered, logit, rtol=1e-5)


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "shuffled"])
def test_predictions_are_in_order_and_without_padding(source: str) -> None:
    arrays = examples()
    preds = fg.Engine().predict(Measuring(), SOURCES[source](arrays))
    assert isinstance(preds, np.ndarray) and preds.shape == (11,)
    np.testing.assert_allclose(
        preds, arrays["x"] @ np.asarray([0.5, -1.0, 2.0], np.float32), rtol=1e-5
    )


def test_many_batches_are_predicted_in_order() -> None:
    preds = fg.Engine().predict(Counting(), fg.ArrayData(np.arange(23), 2, remainder="pad"))
    assert preds.tolist() == list(range(23))


def test_trees_are_predicted() -> None:
    class Trees(Counting):
        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            assert not ctx.training and not fg.is_training()
            return {"twice": 2 * batch, "pair": (batch, jnp.stack([batch, -batch], -1))}

    preds = fg.Engine().predict(init_module(Trees), numbers([1, 2], [3]))
    assert preds["twice"].tolist() == [2, 4, 6] and preds["pair"][1].tolist() == [
        [1, -1],
        [2, -2],
        [3, -3],
    ]


@pytest.mark.full
def test_metrics_that_run_from_step_to_step_are_averaged_over_the_examples() -> None:
    class Stepwise(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            kinds = {
                "last": fg.metrics.LastValue.from_values(batch.mean()),
                "average": fg.metrics.ExponentialMovingAverage.from_values(batch.mean()),
            }
            return fg.Output(metrics={**kinds, "step": ctx.step.astype(float)})

    metrics = fg.Engine().evaluate(init_module(Stepwise), numbers([1, 3], [8]))
    assert metrics == {"last": 4, "average": 4, "step": 0}
    result = fg.Engine(steps=5).fit(Stepwise, numbers([0]))
    assert fg.Engine().evaluate(result, numbers([0]))["step"] == 5


def test_running_metrics_of_any_shape_are_averaged_element_by_element() -> None:
    class Norms(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(
                metrics={
                    "last": fg.metrics.LastValue.from_values(
                        jnp.arange(6.0).reshape(2, 3) * batch.mean()
                    )
                }
            )

    metrics = fg.Engine().evaluate(init_module(Norms), numbers([1, 3], [8]))
    np.testing.assert_allclose(metrics["last"], 4 * np.arange(6).reshape(2, 3), rtol=1e-6)


METRICS = {
    "an array of shape": lambda batch: {"v": batch},
    "of type str": lambda batch: {"v": "x"},
    r"'updates' is both a term of the loss, .* and a metric": lambda batch: {
        "updates": batch.mean()
    },
    r"metrics of .* are of type list: return a dictionary": lambda batch: [batch.mean()],
}


@pytest.mark.parametrize("message", METRICS)
def test_invalid_metrics_are_errors_in_training_and_in_evaluation(message: str) -> None:
    class Wrong(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(losses={"updates": self.weight}, metrics=METRICS[message](batch))

        validation_step = training_step

    for use in (fg.Engine(steps=1).fit, fg.Engine().evaluate):
        with pytest.raises(ModelError, match=message):
            use(init_module(Wrong), numbers([0, 1]))


@pytest.mark.full
def test_scalar_metric_is_weighted_by_examples_and_an_error_for_a_padded_batch() -> None:
    def mean(preds: Any, batch: Any) -> Any:
        return jnp.mean(preds)

    def masked(preds: Any, batch: Any, mask: Any) -> Any:
        return jnp.mean(preds, where=mask)

    for function in (mean, masked):
        task = fg.Task(lambda x: x, loss=function, metrics={"mean": function})
        results = fg.Engine().evaluate(
            task, [(batch,) for batch in numbers([1, 2, 6], [7])], losses={"own": function}
        )
        assert results == {"loss": 4, "own": 4, "mean": 4}
        assert fg.Engine().evaluate(task, [(batch,) for batch in numbers([1, 2, 6], [7])]) == {
            "loss": 4,
            "mean": 4,
        }
    padded = [fg.Batch((np.asarray([1, 3, 0], np.float32),), np.asarray([True, True, False]))]
    assert fg.Engine().evaluate(task, padded) == {"loss": 2, "mean": 2}
    for loss, metric in ((mean, masked), (masked, mean)):
        task = fg.Task(lambda x: x, loss=loss, metrics={"mean": metric})
        with pytest.raises(
            ModelError,
            match=r"is one number for a padded batch, computed without its mask: give an array",
        ):
            fg.Engine().evaluate(task, padded)


@pytest.mark.full
def test_metric_functions_passed_to_evaluate() -> None:
    def both(preds: Any, batch: Any) -> Any:
        return Kept(jnp.ones(len(preds), bool), jnp.stack([preds, batch["y"]], -1))

    arrays = examples()
    metrics = {"off": lambda preds, batch: jnp.abs(preds - batch["y"]), "largest": both}
    engine = fg.Engine()
    preds = engine.predict(Measuring(), [arrays])
    results = engine.evaluate(Measuring(), Padded(arrays), metrics={"off": metrics["off"]})
    assert results["off"] == pytest.approx(np.abs(preds - arrays["y"]).mean(), rel=1e-6)
    results = engine.evaluate(Measuring(), fg.ArrayData(arrays, 4), metrics=metrics)
    assert results["off"] == pytest.approx(np.abs(preds - arrays["y"]).mean(), rel=1e-6)
    np.testing.assert_allclose(results["largest"], np.stack([preds, arrays["y"]], -1), rtol=1e-6)


def test_a_loss_with_several_results_is_an_error_that_names_it() -> None:
    class Two(fg.metrics.Metric):
        mean: fg.metrics.Mean

        def compute(self) -> dict[str, Any]:
            return {"mean": self.mean.compute(), "root": self.mean.compute() ** 0.5}

    def two(preds: Any, batch: Any, mask: Any) -> Two:
        return Two(fg.metrics.Mean.from_values(abs(preds), mask))

    def array(preds: Any, batch: Any, mask: Any) -> fg.metrics.LastValue:
        return fg.metrics.LastValue.from_values(jnp.arange(3.0))

    for losses in ({"two": two}, {"one": lambda preds, batch: abs(preds), "two": array}):
        with pytest.raises(ModelError, match="the loss 'two' of .*'test' .* give one number"):
            fg.Engine().evaluate(Measuring(), [examples()], losses=losses)


@pytest.mark.full
def test_two_metrics_that_give_one_name_are_an_error() -> None:
    class Both(fg.metrics.CollectingMetric):
        values: jax.Array

        def compute(self) -> Any:
            return {"mean": np.mean(self.values[self.mask])}

    metrics = {
        "x": lambda preds, batch: Both(jnp.ones(len(preds), bool), preds),
        "x/mean": lambda preds, batch: preds,
    }
    with pytest.raises(ModelError, match="'x/mean' appears twice"):
        fg.Engine().evaluate(Measuring(), [examples()], metrics=metrics)


@pytest.mark.full
def test_metric_functions_passed_to_evaluate_are_not_kept() -> None:
    """A function that is written in a loop is another one each time; what is compiled for it is
    kept a while."""
    engine, model, data = fg.Engine(), Linear(), regression(8, 4)

    def evaluated() -> weakref.ref[Any]:
        def size(preds: Any, batch: Any) -> Any:
            return abs(preds)

        engine.evaluate(model, data, metrics={"size": size})
        return weakref.ref(size)

    references = [evaluated() for _ in range(20)]
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 16


def test_metric_functions_receive_the_mask() -> None:
    arrays, engine = examples(), fg.Engine()

    def accuracy(preds: Any, batch: Any, mask: Any) -> fg.metrics.Metric:
        return fg.metrics.Accuracy.from_logits(
            jnp.stack([0 * preds, preds], -1), batch["y"] > 0, mask
        )

    expected = np.mean((engine.predict(Measuring(), [arrays]) > 0) == arrays["y"])
    for data in (Padded(arrays), fg.ArrayData(arrays, 4)):
        results = engine.evaluate(Measuring(), data, metrics={"accuracy": accuracy})
        assert results["accuracy"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(
        ModelError,
        match=r"metric 'all' is a Mean of a padded batch, computed without its mask: take it",
    ):
        engine.evaluate(
            Measuring(),
            Padded(arrays),
            metrics={"all": lambda preds, batch: fg.metrics.Mean.from_values(preds)},
        )
    task = fg.Task(
        lambda x: x[0],
        loss=lambda preds, batch: preds,
        metrics={"mean": lambda preds, batch, mask: fg.metrics.Mean.from_values(preds, mask)},
        forward=lambda model, batch, ctx: jax.vmap(model)(batch["x"]),
    )
    assert engine.evaluate(task, Padded(arrays))["mean"] == pytest.approx(
        arrays["x"][:, 0].mean(), rel=1e-6
    )


def test_metric_functions_without_predictions_are_an_error() -> None:
    class Silent(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight)

    with pytest.raises(
        ModelError, match=r"'test' has metrics.* of its own, .*: return fg\.Output\(\.\.\., preds="
    ):
        fg.Engine().evaluate(
            init_module(Silent), numbers([0]), metrics={"a": lambda preds, batch: preds}
        )
    with pytest.raises(ModelError, match="Silent cannot predict: define predict_step"):
        fg.Engine().predict(init_module(Silent), numbers([0]))


class Plain(eqx.Module):
    """No module of ours."""

    weight: jax.Array


class Trainable(Plain):
    """A training step, and no more."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight)


@pytest.mark.parametrize(
    ("model", "call", "missing"),
    [
        (Plain, "evaluate", "validation_step"),
        (Trainable, "evaluate", "validation_step"),
        (Trainable, "predict", "predict_step"),
        (Trainable, "fit", "configure_optimizers"),
    ],
)
def test_module_without_the_step_is_an_error_naming_what_to_define(
    model: Any, call: str, missing: str
) -> None:
    with pytest.raises(
        ModelError,
        match=rf"{model.__name__} has no {missing}: subclass fg\.Module, or give fg\.Task",
    ):
        getattr(fg.Engine(steps=1), call)(model(jnp.zeros(())), numbers([0]))


PREDICTIONS = {
    "nothing": lambda batch: None,
    r"float32\[\]": lambda batch: batch.mean(),
    r"float32\[1\]": lambda batch: batch[:1],
}


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_without_an_example_axis_are_an_error(kind: str) -> None:
    class Predicting(Counting):
        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return PREDICTIONS[kind](batch)

    with pytest.raises(
        ModelError, match=rf"Predicting\.predict_step returned {kind}: return arrays that begin"
    ) as caught:
        fg.Engine().predict(
            init_module(Predicting), fg.ArrayData(np.zeros(4, np.float32), 4, remainder="pad")
        )
    assert caught.value.__notes__[0].startswith(
        "while tracing batch 0 of 'predict' on a batch of float32[4]"
    )


def test_change_of_structure_between_batches_is_an_error_naming_the_batch() -> None:
    class Changing(Counting):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            late = len(batch["x"]) > 1
            predictions = {"kept": Kept(jnp.ones(len(batch["x"]), bool), batch["x"])}
            return fg.Output(
                metrics=(
                    predictions
                    if late and "k" in batch
                    else {"mean": batch["x"].mean()}
                    if late
                    else {}
                )
            )

        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return batch["x"][:, None] * jnp.ones(len(batch["x"]))

    engine, module, data = (
        fg.Engine(),
        init_module(Changing),
        [{"x": batch} for batch in numbers([1], [2], [3, 4])],
    )
    with pytest.raises(ModelError, match="the metrics of batch 2 of 'test' changed .* at mean"):
        engine.evaluate(module, data)
    with pytest.raises(ModelError, match="the metrics of batch 2 of 'test' changed the structure"):
        engine.evaluate(module, [{**batch, "k": batch["x"]} for batch in data])
    with pytest.raises(
        ModelError, match=r"float32\[2,2\] for batch 2, and float32\[1,1\] for batch 0"
    ):
        engine.predict(module, data)
    for call in (engine.evaluate, engine.predict):
        with pytest.raises(
            DataError, match=r"batch 1 of '\w+' has another structure .*: y float32\[1\], not x"
        ):
            call(module, [data[0], {"y": data[1]["x"]}])


def test_the_last_batch_alone_may_be_padded() -> None:
    data = [
        *numbers([1, 2]),
        fg.Batch(np.asarray([3, 0], np.float32), np.asarray([True, False])),
    ]
    assert (
        fg.Engine().evaluate(Counting(), data, metrics={"mean": lambda preds, batch: preds})["mean"]
        == 2
    )


@pytest.mark.parametrize("mask", [np.asarray([True]), np.asarray([1, 0]), np.ones((2, 1), bool)])
def test_mask_of_wrong_shape_for_its_batch_is_an_error(mask: Any) -> None:
    data = [fg.Batch(np.zeros(2, np.float32), mask)]
    engine = fg.Engine(steps=1)
    for call in (engine.fit, engine.evaluate, engine.predict):
        with pytest.raises(
            DataError, match=r"the mask is .*, not bool with one value an example of float32\[2\]"
        ):
            call(Counting(), data)


def test_missing_model_state_is_an_error_saying_how_to_make_it() -> None:
    class Normed(Counting):
        norm: eqx.nn.BatchNorm

        def __init__(self, *, key: Any) -> None:
            super().__init__()
            self.norm = eqx.nn.BatchNorm(1, "batch", mode="batch")

    engine = fg.Engine(steps=1)
    module, state = eqx.nn.make_with_state(Normed)(key=jax.random.key(0))
    for use in (
        engine.fit,
        lambda model, data: engine.fit(module, data),
        lambda model, data: engine.evaluate(module, data),
    ):
        with pytest.raises(
            ModelError,
            match=r"Normed has layers that keep state, .* eqx\.nn\.make_with_state\(Normed\)",
        ):
            use(Normed, numbers([0]))
    assert engine.evaluate((module, state), numbers([0])) == {"updates": 0}


def test_num_batches_limits_evaluate_and_predict() -> None:
    data = numbers([1], [2], [3], [4])
    mean = {"mean": lambda preds, batch: preds}
    assert fg.Engine().evaluate(Counting(), data, num_batches=3, metrics=mean)["mean"] == 2
    assert (
        fg.Engine(fast_dev_run=2).evaluate(Counting(), data, num_batches=3, metrics=mean)["mean"]
        == 1.5
    )
    assert (
        fg.Engine(fast_dev_run=2).evaluate(Counting(), data, num_batches=1, metrics=mean)["mean"]
        == 1
    )
    assert (
        fg.Engine(limit_train_batches=2).evaluate(Counting(), data, metrics=mean)["mean"] == 2.5
    )  # of training only
    assert fg.Engine().predict(Counting(), data, num_batches=2).tolist() == [1, 2]
    assert fg.Engine(fast_dev_run=1).predict(Counting(), data).tolist() == [1]


# --- whose weights --------------------------------------------------------------------------------


@pytest.mark.full
def test_evaluate_accepts_everything_that_holds_a_module() -> None:
    engine, data = fg.Engine(steps=5), classes(20, 8)
    result = engine.fit(Classifier, data)
    expected = engine.evaluate(result, data)
    logits = jax.vmap(result.module.mlp)(data.arrays["x"])
    assert expected["accuracy"] == pytest.approx(
        np.mean(np.argmax(logits, -1) == data.arrays["label"])
    )
    for weights in (result.state, result.module, (result.module, None)):
        assert engine.evaluate(weights, data) == expected
        assert engine.predict(weights, data).tobytes() == engine.predict(result, data).tobytes()
    assert fg.Engine().evaluate(result, data) == expected
    assert engine.evaluate(Classifier(key=jax.random.key(9)), data) != expected


@pytest.mark.full
def test_evaluation_of_other_weights_keeps_no_reference_to_them() -> None:
    engine, data = fg.Engine(), numbers([0])
    for value in (1.0, 2.0):
        module = eqx.tree_at(lambda module: module.weight, Counting(), jnp.full((), value))
        assert engine.evaluate(module, data) == {"updates": -value}

    class Factor(Counting):
        factor: float

        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"factor": jnp.float32(self.factor)})

    for factor in (2.0, 3.0):
        module = eqx.tree_at(lambda module: module.factor, Factor(), factor)
        assert engine.evaluate(module, data) == {"factor": factor}


def test_evaluating_a_non_model_is_an_error() -> None:
    for model in (Classifier, 3, None):
        with pytest.raises(
            ModelError, match=r"a module, \(module, state\), a train state or a result"
        ):
            fg.Engine().evaluate(model, classes())


def test_a_task_is_evaluated_with_its_mask() -> None:
    task = fg.Task(
        lambda x: 2 * x,
        loss=lambda preds, batch: preds,
        metrics={"twice": lambda preds, batch: preds},
    )
    data = [fg.Batch((np.asarray([1, 2, np.nan], np.float32),), np.asarray([True, True, False]))]
    assert fg.Engine().evaluate(task, data) == {"loss": 3, "twice": 3}
    assert fg.Engine().predict(task, data).tolist() == [2, 4]


# --- data modules and evaluations of a fit --------------------------------------------------------


@dataclass
class Parts:
    """A data module."""

    train: Any
    evaluations: dict[str, Any]
    predict: Any


def test_data_module_provides_all_data() -> None:
    mean = {"mean": lambda preds, batch: preds}
    data = Parts(
        numbers([1], [2]), {"test": numbers([3]), "easy": numbers([4], [6])}, numbers([7], [8])
    )
    engine = fg.Engine(steps=3)
    result = engine.fit(Counting, data)
    assert float(result.module.weight) == -3
    assert [batch.tolist() for batch in engine.iter_batches(data)] == [[1], [2], [1]]
    assert engine.evaluate(result, data, metrics=mean)["mean"] == 3
    assert engine.evaluate(result, data, name="easy", metrics=mean)["mean"] == 5
    assert engine.predict(result, data).tolist() == [7, 8]
    with pytest.raises(DataError, match=r"Parts has no evaluation 'eassy'\. Did you mean 'easy'"):
        engine.evaluate(result, data, name="eassy")


def test_data_module_may_lack_unused_parts() -> None:
    engine, data = fg.Engine(steps=1), SimpleNamespace(train=numbers([1]))
    assert float(engine.fit(Counting, data).module.weight) == -1
    assert engine.evaluate(Counting(), SimpleNamespace(evaluations={"test": numbers([1])})) == {
        "updates": 0
    }
    for call, part in ((engine.predict, "predict"), (engine.evaluate, "evaluations")):
        with pytest.raises(
            DataError,
            match=f"SimpleNamespace has no {part}: give it the attribute, or pass the data",
        ):
            call(Counting(), data)


def test_evaluator_named_train_is_an_error() -> None:
    with pytest.raises(PluginError, match="an evaluator is called 'train'"):
        fg.Engine(plugins=[Evaluating(fg.Evaluation("train", numbers([0])), trigger=1)])


def test_evaluations_during_fit_equal_evaluate() -> None:
    data = regression(11, 4)
    specs = [fg.Evaluation("all", data), fg.Evaluation("first", data, num_batches=1)]
    plugin = Evaluating(*specs, trigger=2)
    engine = fg.Engine(steps=4, plugins=[plugin])
    result = engine.fit(Linear, regression())
    assert [(step, name) for step, name, _ in plugin.results] == [
        (2, "all"),
        (2, "first"),
        (4, "all"),
        (4, "first"),
    ]
    assert result.metrics["all"] == engine.evaluate(result, data)
    assert result.metrics["first"] == engine.evaluate(result, data, num_batches=1)
    assert result.history["all/loss"].tolist() == [
        plugin.results[0][2]["loss"],
        plugin.results[2][2]["loss"],
    ]
    assert result.history.steps("all/loss").tolist() == [2, 4]


def test_an_evaluation_changes_no_bit_of_training() -> None:
    quiet = fg.Engine(steps=4).fit(Linear, regression())
    loud = fg.Engine(steps=4, plugins=[Evaluating(fg.Evaluation("all", regression()), trigger=1)])
    assert loud.fit(Linear, regression()).module.weight.tolist() == quiet.module.weight.tolist()


def test_evaluation_of_a_module_view() -> None:
    class Views:
        @fg.hookimpl
        def module_views(self, state: fg.TrainState) -> Any:
            return {"doubled": jax.tree.map(lambda leaf: 2 * leaf, state.module)}

    specs = [
        fg.Evaluation("now", numbers([0])),
        fg.Evaluation("twice", numbers([0]), module_view="doubled"),
    ]
    result = fg.Engine(steps=2, plugins=[Evaluating(*specs, trigger=2), Views()]).fit(
        Counting, numbers([0])
    )
    assert (result.metrics["now"]["updates"], result.metrics["twice"]["updates"]) == (2, 4)
    unknown = Evaluating(fg.Evaluation("now", numbers([0]), module_view="doubledd"), trigger=2)
    with pytest.raises(
        PluginError, match=r"no plugin provides the weights 'doubledd'\. Did you mean 'doubled'"
    ):
        fg.Engine(steps=2, plugins=[unknown, Views()]).fit(Counting, numbers([0]))


def test_unknown_evaluator_is_an_error_suggesting_a_name() -> None:
    def evaluate(run: fg.Run) -> None:
        run.evaluate("tset")

    plugins = [Evaluating(fg.Evaluation("test", numbers([0])), trigger=2), Act(1, evaluate)]
    with pytest.raises(PluginError, match=r"no evaluator is called 'tset'\. Did you mean 'test'"):
        fg.Engine(steps=1, plugins=plugins).fit(Counting, numbers([0]))


@pytest.mark.full
def test_no_action_is_due_in_an_evaluation() -> None:
    class Due:
        @fg.hookimpl
        def loss_terms(self, ctx: fg.Context) -> Any:
            return {"due": jnp.where(ctx.is_due("log") | ctx.is_due("act.act"), 1.0, 0.0)}

    act = Act(1, lambda run: None)
    evaluating = Evaluating(fg.Evaluation("test", regression()), trigger=1)
    result = fg.Engine(plugins=[Due(), act, evaluating], steps=2, log_every=1, autoload=False).fit(
        Linear(), regression()
    )
    assert result.history["train/due"].tolist() == [1, 1] and result.history[
        "test/due"
    ].tolist() == [0, 0]


def test_loss_terms_of_plugins_are_part_of_an_evaluation() -> None:
    class Decay:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> Any:
            return {"l2": jnp.sum(module.weight**2)}

    engine = fg.Engine(plugins=[Decay()])
    metrics = engine.evaluate(Linear(), regression())
    assert metrics["l2"] == 0 and metrics["loss"] == pytest.approx(
        np.mean(regression().arrays["y"] ** 2), rel=1e-6
    )
    module = eqx.tree_at(lambda module: module.weight, Linear(), jnp.asarray([1.0, 2.0, 0.0]))
    metrics, plain = (
        engine.evaluate(module, regression()),
        fg.Engine().evaluate(module, regression()),
    )
    assert metrics["l2"] == 5 and metrics["loss"] == pytest.approx(plain["loss"] + 5, rel=1e-6)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_empty_data_is_an_error(call: str) -> None:
    with pytest.raises(DataError, match="no batch 0 in epoch 0"):
        getattr(fg.Engine(), call)(Counting(), [])


def test_training_and_evaluations_measure_different_metrics_G25() -> None:
    """Also which metrics there are, by name and kind, before anything has run."""

    def loss(preds: Any, batch: Any) -> Any:
        return (preds - batch[1]) ** 2

    def error(preds: Any, batch: Any) -> Any:
        return jnp.abs(preds - batch[1])

    def last(preds: Any, batch: Any, mask: Any) -> Any:
        return fg.metrics.LastValue.from_values(preds[-1])

    x = np.arange(4, dtype=np.float32)
    data = [(x, 2 * x)]

    class Scale(eqx.Module):
        factor: Any

        def __call__(self, value: Any) -> Any:
            return self.factor * value

    model = Scale(jnp.ones(()))
    task = fg.Task(
        model, loss, optax.sgd(0.1), metrics={"last": last}, eval_metrics={"error": error}
    )
    engine = fg.Engine(
        steps=1, plugins=[Evaluating(fg.Evaluation("val", data), trigger=1)], autoload=False
    )
    state = engine.init_state(task, data)
    assert engine.get_metric_types(state) == {
        "loss": fg.metrics.Mean,
        "batch_loss": fg.metrics.LastValue,
        "loss_average": fg.metrics.ExponentialMovingAverage,
        "last": fg.metrics.LastValue,
    }
    assert engine.get_metric_types(state, "val") == {
        "loss": fg.metrics.Mean,
        "error": fg.metrics.Mean,
    }
    with pytest.raises(PluginError, match="no evaluator is called 'vla'. Did you mean 'val'"):
        engine.get_metric_types(state, "vla")
    assert engine.evaluate(task, data) == {"loss": 3.5, "error": 1.5}
    plain = fg.Task(model, loss, optax.sgd(0.1), metrics={"last": last})
    assert engine.evaluate(plain, data) == {"loss": 3.5, "last": 3.0}
