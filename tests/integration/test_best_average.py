"""The best by an average: what was measured is what is restored, evaluated and predicted with."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, FulguriteError, PluginError
from fulgurite_averaging import EMA, Average, Mean
from fulgurite_checkpoint import Checkpointer, load
from fulgurite_evaluators import Evaluator
from fulgurite_stopping import EarlyStopping

pytestmark = pytest.mark.full

STEPS = 8
DATA = [np.ones(2, np.float32)]


class Counter(fg.Module):
    """A weight that is the number of updates, a state that is ten times that, and their distance
    from what the batch says."""

    weight: jax.Array
    index: eqx.nn.StateIndex

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.model_state is not None
        state = ctx.model_state.set(self.index, ctx.model_state.get(self.index) + 10)
        return fg.Output(self.weight, model_state=state)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.model_state is not None
        sum_of_both = self.weight + ctx.model_state.get(self.index)
        return fg.Output(jnp.mean(jnp.abs(sum_of_both - batch)), preds=batch * 0 + self.weight)

    def configure_optimizers(self) -> Any:
        return optax.sgd(-1.0)


def make(key: Any) -> Any:
    return eqx.nn.make_with_state(Counter)(key=key)


def list_averages(rule: EMA | Mean) -> list[float]:
    """Return the averages of 1, 2, ..., by hand: the EMA begins at 0."""
    if isinstance(rule, Mean):
        return [float(np.mean(np.arange(1, step + 1))) for step in range(1, STEPS + 1)]
    assert rule.decay is not None
    averages = [0.0]
    for step in range(1, STEPS + 1):
        averages.append(rule.decay * averages[-1] + (1 - rule.decay) * step)
    return averages[1:]


def evaluate_on(target: float, *, is_custom: bool) -> Evaluator:
    """Return an evaluation of the average, by the module's step or by a function."""

    def measure(state: Any, step: int) -> dict[str, Any]:
        both = state.module.weight + state.model_state.get(state.module.index)
        return {"loss": abs(both - target)}

    if is_custom:
        return Evaluator("ema", every=1, module_view="averaged", fn=measure)
    data = [np.full(2, target, np.float32)]
    return Evaluator("ema", data, every=1, module_view="averaged")


@pytest.mark.parametrize(
    ("rule", "step", "is_custom"),
    [(EMA(0.5), 3, False), (EMA(0.9), 5, True), (Mean(), STEPS, True)],
    ids=["half", "slow", "mean"],
)
def test_training_ends_with_the_average_that_was_the_best(
    rule: EMA | Mean, step: int, is_custom: bool
) -> None:
    average = list_averages(rule)[step - 1]
    test = evaluate_on(11 * average, is_custom=is_custom)
    stopping = EarlyStopping("ema/loss", patience=STEPS, restore_best=True)
    engine = fg.Engine(steps=STEPS, autoload=False, plugins=[Average(rule), test, stopping])
    result = engine.fit(make, DATA)
    np.testing.assert_allclose(result.module.weight, average, rtol=1e-6)
    assert result.model_state is not None
    state = result.model_state.get(result.module.index)
    np.testing.assert_allclose(state, 10 * average, rtol=1e-6)
    metrics = engine.evaluate(result, [np.full(2, 11 * average, np.float32)])
    assert metrics["loss"] == pytest.approx(0, abs=1e-4)
    assert f"with the weights 'averaged' of step {step}, where ema/loss was" in result.messages[0]


def test_a_threshold_that_is_passed_ends_with_the_average_that_passed_it() -> None:
    """Nothing is kept at the step that ends training."""
    average = list_averages(EMA(0.5))[3]
    stopping = EarlyStopping("ema/loss", threshold=1e-3, restore_best=True)
    plugins = [Average(EMA(0.5)), evaluate_on(11 * average, is_custom=False), stopping]
    result = fg.Engine(steps=STEPS, autoload=False, plugins=plugins).fit(make, DATA)
    assert int(result.state.step) == 4
    np.testing.assert_allclose(result.module.weight, average, rtol=1e-6)


def test_load_reads_what_was_trained_and_says_where_the_best_is_an_average(tmp_path: Path) -> None:
    best_step = 2
    test = evaluate_on(11 * list_averages(EMA(0.5))[best_step - 1], is_custom=True)
    plugins = [Average(EMA(0.5)), test, Checkpointer(every=1, monitor="ema/loss")]
    fg.Engine(steps=3, autoload=False, plugins=plugins, run_dir=tmp_path).fit(make, DATA)
    with pytest.raises(CheckpointError, match="best by the weights 'averaged'.*load_weights"):
        load(tmp_path, "best", model=make(None))
    view: Any = "averaged"
    with pytest.raises(CheckpointError, match="view is 'averaged', which a plugin makes"):
        load(tmp_path, "best", model=make(None), view=view)
    module, state = load(tmp_path, "best", model=make(None), view="current")
    assert float(module.weight) == best_step
    assert float(state.get(module.index)) == 10 * best_step


def test_weights_that_training_cannot_end_with_are_refused_before_the_first_step() -> None:
    class Halves:
        @fg.hookimpl
        def module_views(self, state: fg.TrainState) -> dict[str, Any]:
            weight = state.module.weight.astype(jnp.bfloat16)
            return {"half": eqx.tree_at(lambda module: module.weight, state.module, weight)}

    test = Evaluator("test", DATA, every=1, module_view="half")
    plugins = [Halves(), test, EarlyStopping("test/loss", restore_best=True)]
    with pytest.raises(ConfigurationError, match="weights 'half', which have other arrays"):
        fg.Engine(steps=2, autoload=False, plugins=plugins).fit(make, DATA)


@pytest.mark.full
@pytest.mark.parametrize("weights_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_best_checkpoint_is_read_with_the_weights_that_were_measured(
    tmp_path: Path, weights_only: bool
) -> None:
    average = list_averages(EMA(0.5))[4]
    test = evaluate_on(11 * average, is_custom=False)
    checkpointer = Checkpointer(
        every=1, max_to_keep=1, monitor="ema/loss", weights_only=weights_only
    )
    plugins = [Average(EMA(0.5)), test, Evaluator("raw", DATA, every=1), checkpointer]
    engine = fg.Engine(steps=STEPS, autoload=False, plugins=plugins, run_dir=tmp_path)
    trained = engine.fit(make, DATA)
    best = fg.CheckpointRef(tmp_path, "best")
    data = test.data
    # A program of its own, without a monitor: the run tells by what it chose.
    reader = fg.Engine(plugins=[Average(EMA(0.5)), Checkpointer(every=1)], autoload=False)
    assert reader.evaluate(make, data, weights=best)["loss"] == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(reader.predict(make, data, weights=best), [average] * 2, rtol=1e-6)
    np.testing.assert_allclose(reader.load_weights(make, best).module.weight, average, rtol=1e-6)
    for reference, weight in [
        (fg.CheckpointRef(tmp_path, "best", view="current"), 5.0),
        (fg.CheckpointRef(tmp_path, 5), 5.0),
        (fg.CheckpointRef(tmp_path), STEPS),
        (fg.CheckpointRef(tmp_path, view="averaged"), list_averages(EMA(0.5))[-1]),
    ]:
        read = reader.load_weights(make, reference)
        np.testing.assert_allclose(read.module.weight, weight, rtol=1e-6)
    # By another metric it is another checkpoint, and the module that was trained.
    other = fg.Engine(
        plugins=[Average(EMA(0.5)), Checkpointer(every=1, monitor="raw/loss", mode="max")],
        autoload=False,
    )
    assert float(other.load_weights(make, best).module.weight) == STEPS
    bare = fg.Engine(plugins=[Checkpointer(every=1)], autoload=False)
    with pytest.raises(PluginError, match="no plugin provides the weights 'averaged'") as error:
        bare.evaluate(make, data, weights=best)
    assert "view='current'" in str(error.value.__notes__)
    start = fg.Engine(
        steps=1, plugins=[Checkpointer(every=9)], autoload=False, run_dir=tmp_path / "next"
    )
    with pytest.raises(ConfigurationError, match="init_from reads the module that was trained"):
        start.fit(make, DATA, init_from=best)
    raw = fg.CheckpointRef(tmp_path, "best", view="current")
    assert float(start.fit(make, DATA, init_from=raw).module.weight) == 6.0
    with pytest.raises(ConfigurationError, match="leave view out"):
        start.fit(make, DATA, resume=fg.CheckpointRef(tmp_path, view="averaged"))
    if not weights_only:
        # A run resumes with what it had, which ends as it did.
        resumed = fg.Engine(steps=STEPS, autoload=False, plugins=plugins, run_dir=tmp_path)
        again = resumed.fit(make, DATA, resume="best")
        np.testing.assert_array_equal(again.module.weight, trained.module.weight)


def test_a_view_that_is_no_name_is_an_error() -> None:
    with pytest.raises(FulguriteError, match="CheckpointRef: view"):
        fg.CheckpointRef("run", view=3)  # type: ignore[arg-type]
