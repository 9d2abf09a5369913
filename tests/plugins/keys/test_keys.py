"""Losses, metrics, summaries and inputs by key, below the compiler where they live there."""

import dataclasses
import traceback
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses
import fulgurite_metrics
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite import RngStreams
from fulgurite.errors import ConfigurationError, ModelError, PathError
from fulgurite_evaluators import Evaluator
from fulgurite_keys import (
    L1,
    L2,
    Histogram,
    Images,
    Key,
    KeyedTask,
    Loss,
    Losses,
    LossFunction,
    Metrics,
    SoftmaxCrossEntropy,
    Summaries,
    TreeMean,
    Value,
    keyed,
    register_prefix,
)
from fulgurite_keys.fields import make_call_scope
from fulgurite_keys.scope import Scope
from fulgurite_metrics import Norm, RocAuc


@dataclasses.dataclass(frozen=True)
class TenTimes(Loss):
    values: Key

    def compute(self, values: Any, *, mask: Any, weight: Any, reduction: Any) -> Any:
        return 10 * fg.metrics.Mean.from_values(values, mask).compute()


def evaluate(loss: Loss, batch: Any, mask: Any = None, step: int = 0) -> float:
    return float(loss.evaluate(Scope({"batch": batch}, "losses"), mask, jnp.int32(step)))


def test_weights_schedules_and_masks() -> None:
    ones = jnp.ones((2, 3))
    assert evaluate(TenTimes("batch"), ones) == 10
    assert evaluate(TenTimes("batch", weight=2.5), ones) == 25
    assert evaluate(TenTimes("batch", weight=lambda step: step / 20), ones, step=100) == 50
    rows = jnp.array([[1.0], [2.0]]) * ones
    mask = jnp.array([True, False])
    assert evaluate(TenTimes("batch"), rows) == 15
    assert evaluate(TenTimes("batch"), rows, mask) == 10
    assert evaluate(TenTimes("batch", weight=3), rows) == 45
    assert evaluate(TenTimes("batch", weight=3), rows, mask) == 30


@pytest.mark.full
def test_masks_and_weights_of_examples_are_keys() -> None:
    batch = {
        "x": jnp.array([1.0, 2.0, 4.0]),
        "valid": jnp.array([True, True, False]),
        "weight": jnp.array([1.0, 3.0, 1.0]),
    }
    assert evaluate(L1("batch.x", mask="batch.valid"), batch) == 1.5
    assert evaluate(L1("batch.x", mask="batch.valid"), batch, jnp.array([False, True, True])) == 2
    weighted = Value("batch.x", example_weight="batch.weight", reduction="weighted_mean")
    assert evaluate(weighted, batch) == pytest.approx(11 / 5)
    function = LossFunction(fulgurite_losses.huber_loss, "batch.x", "batch.weight")
    assert evaluate(function, batch) == pytest.approx((0 + 0.5 + 2.5) / 3)


def test_the_mask_of_the_batch_does_not_apply_to_parameters() -> None:
    scope = Scope({"module": {"a": {"weight": jnp.full(3, 2.0)}, "b": jnp.ones(1)}}, "losses")
    loss = L2("params.**.weight", weight=0.5)
    assert loss.evaluate(scope, jnp.array([True, False]), 0) == 2.0


def test_the_mask_of_the_batch_applies_to_what_another_first_name_finds() -> None:
    """Unless it is said not to begin with the examples."""
    register_prefix("test_halves", lambda values: values["batch"] / 2)
    register_prefix("test_rate", lambda values: jnp.full((3,), 0.5), per_example=False)
    batch, mask = jnp.array([2.0, 4.0, 100.0]), jnp.array([True, True, False])
    assert evaluate(L1("test_halves"), batch, mask) == 1.5
    assert evaluate(L1("test_rate"), batch, mask[:2]) == 0.5
    scope = Scope({"batch": batch}, "metrics")
    mean = keyed(fg.metrics.Mean.from_values, "test_halves").evaluate(scope, mask)
    assert mean.compute() == 1.5


def test_losses_of_a_module_are_those_of_its_floats() -> None:
    """Not of a counter or of a random key."""
    module = {"weight": jnp.full(3, 2.0), "count": jnp.int32(7), "key": jax.random.key(0)}
    assert L2("module").evaluate(Scope({"module": module}, "losses"), None, 0) == 4.0
    with pytest.raises(ConfigurationError, match="in a module none of floats"):
        L2("module.count").evaluate(Scope({"module": module}, "losses"), None, 0)


@pytest.mark.full
def test_means_of_trees() -> None:
    tree = {"a": jnp.arange(12), "b": {"c": jnp.arange(8), "d": jnp.arange(9)}}
    means = keyed(fg.metrics.Mean.from_values, "batch")(None, tree)
    assert {path: float(mean.compute()) for path, mean in means.items()} == {
        "a": 5.5,
        "b.c": 3.5,
        "b.d": 4.0,
    }
    assert TreeMean("batch")(None, tree).compute() == pytest.approx(13 / 3)
    glob = {"x": {"d": jnp.arange(2)}, "y": {"z": {"d": jnp.arange(4)}}}
    metric = TreeMean("batch.**.d")(None, glob)
    assert metric.compute() == 1.0
    assert metric.merge(TreeMean("batch.**.d")(None, glob)).compute() == 1.0


def test_norms_of_trees() -> None:
    tree = {"a": jnp.arange(1.0, 4.0), "b": jnp.arange(4.0, 7.0)}
    assert keyed(Norm.from_tree, "batch")(None, tree).compute() == pytest.approx(91**0.5)
    rows = jnp.stack([tree["a"], tree["b"]])
    assert keyed(Norm.from_vectors, "batch")(None, rows).compute() == pytest.approx(6.258311)
    with pytest.raises(
        ConfigurationError, match=r"takes no mask.*give another one, such as Norm\.from_vectors"
    ):
        keyed(Norm.from_tree, "batch")(None, rows, jnp.array([True, False]))


def test_metrics_by_function_and_for_evaluations() -> None:
    batch = {"label": jnp.array([0, 0, 1, 1])}
    scores = jnp.array([0.1, 0.4, 0.35, 0.8])
    function = fulgurite_metrics.AveragePrecision.from_scores
    measure = keyed(function, "preds", "batch.label", for_evaluations=True)
    assert measure(scores, batch).compute() == pytest.approx(0.833333)
    area = keyed(RocAuc.from_scores, "preds", "batch.label")
    assert area(scores, batch).compute() == 0.75
    assert area.for_evaluations  # known of this function
    assert area.describe() == "keyed(RocAuc.from_scores, 'preds', 'batch.label')"
    accuracy = keyed(fg.metrics.Accuracy.from_logits, "preds", "batch.label", top_k=2)
    assert not accuracy.for_evaluations
    assert accuracy.describe().endswith("'batch.label', top_k=2)")


class Net(fg.Module):
    net: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.net = eqx.nn.MLP(3, 2, 4, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(preds={"logits": jax.vmap(self.net)(batch["x"])})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def make_data(size: int = 20, batch_size: int = 5) -> fg.ArrayData:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(size, 3)).astype(np.float32)
    return fg.ArrayData(
        {"x": inputs, "label": rng.integers(0, 2, size)}, batch_size, remainder="pad"
    )


CROSS_ENTROPY = SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label")
ACCURACY = keyed(fg.metrics.Accuracy.from_logits, "preds.logits", "batch.label")


@pytest.mark.full
def test_a_run_by_keys_is_the_one_by_hand() -> None:
    class ByHand(Net):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            logits = jax.vmap(self.net)(batch["x"])
            labels = batch["label"]
            loss = fulgurite_losses.softmax_cross_entropy(logits, labels, mask=ctx.mask)
            accuracy = fg.metrics.Accuracy.from_logits(logits, labels, ctx.mask)
            return fg.Output(losses={"ce": loss}, metrics={"metrics/accuracy": accuracy})

    data = make_data(18)
    metrics = Metrics(
        accuracy=ACCURACY,
        update=keyed(Norm.from_tree, "updates"),
        auc=keyed(RocAuc.from_scores, "preds.logits[:,1]", "batch.label"),
    ).for_evaluators(
        second={
            "accuracy": None,
            "auc": None,
            "top": keyed(fg.metrics.Accuracy.from_logits, "preds.logits", "batch.label", top_k=2),
        }
    )
    losses = Losses(ce=CROSS_ENTROPY).for_evaluators(second={"ce": None, "l1": L1("preds.logits")})
    evaluators = [Evaluator(name, data) for name in ("first", "second")]
    by_keys = fg.Engine(steps=8, plugins=[losses, metrics, *evaluators]).fit(Net, data)
    by_hand = fg.Engine(steps=8).fit(ByHand, data)
    for ours, theirs in zip(
        jax.tree.leaves(eqx.filter(by_keys.module, eqx.is_array)),
        jax.tree.leaves(eqx.filter(by_hand.module, eqx.is_array)),
        strict=True,
    ):
        assert (ours == theirs).all()
    train = by_keys.metrics["train"]
    assert train["metrics/update"] > 0 and "metrics/auc" not in train
    for name in ("loss", "ce", "metrics/accuracy"):
        assert train[name] == by_hand.metrics["train"][name]
    first, second = by_keys.metrics["first"], by_keys.metrics["second"]
    assert {"loss", "ce", "metrics/accuracy", "metrics/auc"} == first.keys()
    assert {"loss", "l1", "metrics/top"} == second.keys() and second["metrics/top"] == 1


@pytest.mark.full
def test_a_mistyped_evaluator_is_told() -> None:
    losses = Losses(ce=CROSS_ENTROPY).for_evaluators(frist={"l1": L1("preds.logits")})
    metrics = Metrics(accuracy=ACCURACY).for_evaluators(first={"accuracy": None})
    plugins = [losses, metrics, Evaluator("first", make_data())]
    messages = fg.Engine(steps=1, plugins=plugins, autoload=False).fit(Net, make_data()).messages
    (message,) = (text for text in messages if "for_evaluators" in text)
    assert message.endswith(
        "no evaluation of this fit is called 'frist', as Losses.for_evaluators names it. "
        "Did you mean 'first'?"
    )


def test_a_metric_of_no_array_is_an_error() -> None:
    """It would not be there, or divide by zero when it is computed."""
    for measure in (TreeMean("preds"), keyed(fg.metrics.Mean.from_values, "preds")):
        with pytest.raises(ConfigurationError, match="key finds no array"):
            measure({"name": "x"}, None)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            Losses(ce=SoftmaxCrossEntropy("preds.logit", "batch.label")),
            r"no preds\.logit .*Did you mean 'preds\.logits'",
        ),
        (Metrics(a=keyed(Norm.from_tree, "updates.nets")), r"Did you mean 'updates\.net'"),
        (Summaries(a=Histogram("batch.y")), r"There is: batch\.label, batch\.x"),
        (Losses(a=L1("interms.net.layer[0]")), r"Did you mean 'interms\.net\.layers\[0\]'"),
    ],
    ids=["losses", "metrics", "summaries", "interms"],
)
def test_a_mistyped_key_is_seen_before_anything_is_compiled(
    plugin: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    plugins = [plugin] if isinstance(plugin, Losses) else [plugin, Losses(ce=CROSS_ENTROPY)]
    with pytest.raises(PathError, match=message):
        fg.Engine(steps=1, plugins=plugins).fit(Net, make_data())


def test_losses_and_metrics_are_checked_where_they_are_made() -> None:
    with pytest.raises(ConfigurationError, match="Losses: ce is 'preds'; give a Loss"):
        Losses(ce="preds")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="leaves out 'x', which is not there"):
        Losses(ce=CROSS_ENTROPY).for_evaluators(test={"x": None})
    with pytest.raises(ConfigurationError, match="a needs both interms, which only the forward"):
        Metrics(a=keyed(Norm.from_tree, "grads", mask="interms.net"))
    with pytest.raises(ConfigurationError, match="have no step for a schedule"):
        L1("preds", weight=lambda step: step)(jnp.ones(2), {})
    with pytest.raises(PathError, match="'module' is not available to the losses=, metrics= "):
        L2("params")(jnp.ones(2), {})
    assert make_call_scope(None, {}).values.keys() == {"batch", "preds"}
    assert repr(Losses(ce=L1("preds", weight=2.0))) == "Losses(ce=L1(preds='preds', weight=2.0))"


class Encoder(eqx.Module):
    linear: eqx.nn.Linear
    image: Key = eqx.field(static=True, default="batch.x[:, :2]")

    def __call__(self, image: jax.Array, *, key: jax.Array) -> Any:
        return {"code": self.linear(image), "noise": jax.random.normal(key)}


def call_step(task: fg.Module, batch: Any) -> fg.Output:
    streams = RngStreams(jax.random.key(0), [fg.RngStream("default")])
    ctx = fg.Context(streams, jnp.int32(0), training=True)
    return task.training_step(batch, ctx)


def test_inputs_of_a_model_by_its_own_keys() -> None:
    model = Encoder(eqx.nn.Linear(2, 4, key=jax.random.key(0)))
    task = KeyedTask(model, optimizer=optax.sgd(0.1))
    assert task.configure_optimizers() is task.optimizer
    batch = {"x": jnp.ones((5, 3))}
    preds = call_step(task, batch).preds
    assert preds["code"].shape == (5, 4) and len(set(preds["noise"].tolist())) == 5
    other = KeyedTask(model, inputs={"image": "batch.y"})
    with pytest.raises(PathError, match=r"There is: batch\.x"):
        call_step(other, batch)
    with pytest.raises(ConfigurationError, match="does not know the inputs of Linear"):
        KeyedTask(model.linear)
    with pytest.raises(ConfigurationError, match="are in the batch"):
        KeyedTask(model, inputs={"image": "preds.x"})
    with pytest.raises(ConfigurationError, match="no optimizer"):
        other.configure_optimizers()


class WholeBatch(eqx.Module):
    """Subtracts the mean over the batch, and adds one random number to all."""

    count: eqx.nn.StateIndex

    def __call__(self, x: Any, state: Any = None, *, key: Any) -> Any:
        preds = x - x.mean(axis=0) + jax.random.normal(key)
        return preds if state is None else (preds, state.set(self.count, state.get(self.count) + 1))


def test_a_model_of_whole_batches_is_called_once_with_one_key_and_its_state() -> None:
    model, state = eqx.nn.make_with_state(WholeBatch)(eqx.nn.StateIndex(jnp.int32(3)))
    x = np.asarray([[1.0, 4.0], [3.0, 0.0]], np.float32)
    streams = RngStreams(jax.random.key(0), [fg.RngStream("default")])
    ctx = fg.Context(streams, jnp.int32(0), training=True)
    noise = jax.random.normal(streams.key("default", "train"))
    expected = np.asarray([[-1, 2], [1, -2]]) + np.asarray(noise)
    task = KeyedTask(model, {"x": "batch.x"}, map=False)
    np.testing.assert_allclose(task.training_step({"x": x}, ctx).preds, expected, rtol=1e-6)
    with_state = task.training_step({"x": x}, dataclasses.replace(ctx, model_state=state))
    np.testing.assert_allclose(with_state.preds, expected, rtol=1e-6)
    assert with_state.model_state is not None
    assert with_state.model_state.get(model.count) == 4


def run_around(plugin: Any, output: Any, batch: Any) -> Any:
    """Return what a plugin makes of the output of a step, without an engine."""
    ctx: Any = dataclasses.make_dataclass(
        "Ctx", ["evaluation", "training", "mask", "step", "model_state"]
    )(None, True, None, jnp.int32(0), None)
    return plugin.around_forward(lambda module, batch: output, {}, batch, ctx)


def test_summaries_are_drawn_where_they_are_shown() -> None:
    summaries = Summaries(
        every=10, image=Images("batch.image[:2]"), flat=Images("preds", shape=(2, 3, 1))
    )
    assert summaries.every == 10
    batch = {"image": jnp.ones((4, 2, 3))}
    media = run_around(summaries, fg.Output(preds=jnp.zeros((4, 6))), batch).media
    assert media["image"]().pixels.shape == (2, 2, 3, 1)
    assert media["flat"]().pixels.shape == (4, 2, 3, 1)


def test_a_summary_is_a_function_of_predictions_and_batch_for_an_evaluator() -> None:
    preds = jnp.linspace(0, 1, 24).reshape(4, 6)
    shown: Any = Images("preds[:2]", shape=(2, 3, 1))(preds, {})
    expected = np.round(np.linspace(0, 1, 24).reshape(4, 2, 3, 1)[:2] * 255)
    np.testing.assert_allclose(shown.pixels, expected, atol=1)
    with pytest.raises(PathError, match="'module' is not available to the .* and summaries="):
        Histogram("module")(preds, {})


def test_summaries_of_what_is_there_after_the_update() -> None:
    summaries = Summaries(grads=Histogram("grads", bins=2), image=Images("batch.image"))
    batch = {"image": jnp.ones((4, 2, 3))}
    output = fg.Output(preds=jnp.zeros(4), losses={"l": jnp.float32(0)})
    assert run_around(summaries, output, batch).media.keys() == {"image"}
    ctx: Any = type("Ctx", (), {"mask": None, "step": 0, "model_state": None})
    state: Any = type("State", (), {"module": None, "opt_state": None})
    grads = {"a": jnp.array([0.0, 0.1, 1.0])}
    shown = summaries.step_metrics(state, output, grads, grads, batch, ctx)
    assert shown.keys() == {"grads"} and shown["grads"]().counts.tolist() == [2, 1]


def test_what_a_step_returns_stays() -> None:
    losses = Losses(l1=L1("batch"))
    bare = run_around(losses, jnp.float32(3), jnp.ones(4))
    assert bare.loss == 3 and bare.losses == {"l1": 1}
    preds = jnp.ones((4, 2))
    assert run_around(losses, preds, jnp.ones(4)) is preds
    for plugin, output in (
        (losses, fg.Output(losses={"l1": jnp.float32(0)})),
        (Metrics(a=keyed(Norm.from_tree, "batch")), fg.Output(metrics={"metrics": {"a": 0.0}})),
        (Summaries(a=Histogram("batch")), fg.Output(media={"a": lambda: None})),
    ):
        with pytest.raises(ModelError, match="comes? from the step and from"):
            run_around(plugin, output, jnp.ones(4))


def test_a_key_that_is_none_shows_the_line_that_gives_it() -> None:
    for call in (
        lambda: L1("predictions"),
        lambda: LossFunction(fulgurite_losses.squared_error, "predictions"),
        lambda: Images("predictions"),
        lambda: TreeMean("predictions"),
    ):
        with pytest.raises(ConfigurationError, match="begins with none") as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert {frame.filename for frame in frames} == {__file__}
