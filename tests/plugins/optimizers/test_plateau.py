"""When updates become smaller because a metric no longer improves, worked out by hand."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import ReduceOnPlateau

NAN, INF = float("nan"), float("inf")


class Falling(fg.Module):
    """A weight that falls by the scale of its updates, and a loss that the batch says."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch) + self.weight - jax.lax.stop_gradient(self.weight))

    def configure_optimizers(self) -> Any:
        return optax.sgd(1.0)


class Masked(Falling):
    """With an array that is not finite from the beginning."""

    mask: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        super().__init__(key=key)
        self.mask = jnp.array([0, -jnp.inf])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = super().training_step(batch, ctx).loss
        return fg.Output(loss + 0 * jnp.sum(jax.nn.softmax(self.mask)))


def fit(*plugins: Any, losses: list[float], log_every: Any = 1, **settings: Any) -> fg.FitResult:
    return train(Falling, *plugins, losses=losses, log_every=log_every, **settings)


def train(model: Any, *plugins: Any, losses: list[float], **settings: Any) -> fg.FitResult:
    engine = fg.Engine(autoload=False, plugins=plugins, **settings)
    return engine.fit(model, [np.full(2, loss, np.float32) for loss in losses])


# By each name: mode, tolerances, values of the metric, and the scale after each, by hand. The
# factor is 1/2 and the patience 1.
CASES: dict[str, tuple[str, dict[str, float], list[float], list[float]]] = {
    "accuracy": ("max", {}, [0.9] * 5, [1, 0.5, 0.25, 0.125, 0.0625]),
    "rising": ("max", {}, [0.1, 0.2, 0.3, 0.4, 0.5], [1] * 5),
    "reward": ("max", {}, [-5.0, -5.0, -4.0, -4.0003, -3.9997], [1, 0.5, 0.5, 0.25, 0.125]),
    "likelihood": ("min", {}, [-5.0] * 5, [1, 0.5, 0.25, 0.125, 0.0625]),
    "falling": ("min", {}, [3.0, 1.0, -1.0, -3.0, -5.0], [1] * 5),
    "slowly": ("min", {"rtol": 0.1}, [-5.0, -5.4, -5.6, -5.7, -6.2], [1, 0.5, 0.5, 0.25, 0.25]),
    "zero": ("min", {}, [0.0, 0.0, -1e-6, -1e-6, -2e-6], [1, 0.5, 0.5, 0.25, 0.25]),
    "tenth": ("min", {"rtol": 0.0}, [0.1] * 5, [1, 0.5, 0.25, 0.125, 0.0625]),
    "beyond": ("max", {"atol": 1.0, "rtol": 0.0}, [0.0, 1.0, 2.0, 2.0, 3.1], [1, 0.5, 0.5, 0.25, 0.25]),
    "broken": ("min", {}, [NAN, 1.0, -INF, 0.5, INF], [0.5, 0.5, 0.25, 0.25, 0.125]),
    "unbounded": ("max", {}, [INF, 1.0, 2.0, NAN, 1e39], [0.5, 0.5, 0.5, 0.25, 0.125]),
    "integer": ("max", {}, [3, 3, 4, 4, 5], [1, 0.5, 0.5, 0.25, 0.25]),
}  # fmt: skip


@pytest.mark.full
def test_a_plateau_is_found_in_both_modes_and_for_values_of_either_sign() -> None:
    def measure(state: fg.TrainState, step: int) -> dict[str, float]:
        return {name: values[step - 1] for name, (_, _, values, _) in CASES.items()}

    plugins = [
        ReduceOnPlateau(f"test/{name}", 1, mode=mode, factor=0.5, patience=1, **tolerances)  # type: ignore[arg-type]
        for name, (mode, tolerances, _, _) in CASES.items()
    ]
    history = fit(
        Evaluator("test", every=1, fn=measure), *plugins, losses=[1.0] * 5, steps=5
    ).history
    scales = {name: history[f"reduce_on_plateau/test/{name}/scale"].tolist() for name in CASES}
    assert scales == {name: scale for name, (_, _, _, scale) in CASES.items()}


@pytest.mark.full
def test_an_array_that_is_infinite_from_the_beginning_stays_so() -> None:
    test = Evaluator("test", every=1, fn=lambda state, step: {"loss": 1.0})
    plateau = ReduceOnPlateau("test/loss", 1, factor=0.5, patience=1)
    module = train(Masked, test, plateau, losses=[1.0] * 4, steps=4).module
    np.testing.assert_array_equal(module.mask, [0, -np.inf])
    np.testing.assert_allclose(module.weight, -(1 + 1 + 0.5 + 0.25))


def test_a_cooldown_counts_nothing_and_the_smallest_scale_is_kept() -> None:
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    plateau = ReduceOnPlateau("test/loss", 1, factor=0.5, patience=2, cooldown=1, min_scale=0.3)
    test = Evaluator("test", every=1, fn=lambda state, step: {"loss": values[step - 1]})
    result = fit(test, plateau, losses=[1.0] * 8, steps=8)
    # Failed at 2 and 3: halved. 4 is passed over, 5 fails, 6 is better, 7 and 8 fail: .3, not .25.
    scales = result.history["reduce_on_plateau/scale"]
    np.testing.assert_allclose(scales, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3], rtol=1e-6)
    np.testing.assert_allclose(result.module.weight, -(3 * 1 + 5 * 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 1.0},
        {"factor": 0.0},
        {"factor": NAN},
        {"patience": 0},
        {"patience": 1.5},
        {"cooldown": -1},
        {"rtol": -0.1},
        {"atol": NAN},
        {"min_scale": INF},
    ],
)
def test_numbers_that_make_no_sense_are_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"ReduceOnPlateau: {next(iter(options))} is"):
        ReduceOnPlateau("test/loss", 1, **options)


@pytest.mark.parametrize(
    ("losses", "log_every", "every", "scales"),
    [
        ([9, 9, 1, 1, 0, 0, 1, 1], 2, 4, [1, 0.5]),  # not 9 and 0, those of the windows before
        ([1] * 4, 2, 2, [1, 0.5]),
        ([1] * 3, 1, 1, [1, 0.5, 0.25]),
        ([9, 1, 9, 1], fg.EveryEpoch(), fg.EveryEpoch(), [1, 0.5]),
    ],
)
def test_a_metric_of_training_is_that_of_the_window_that_ends_at_the_step(
    losses: list[float], log_every: Any, every: Any, scales: list[float]
) -> None:
    plateau = ReduceOnPlateau("train/loss", every, factor=0.5, patience=1)
    length = {"epochs": 2} if isinstance(every, fg.EveryEpoch) else {"steps": len(losses)}
    data = losses[:2] if isinstance(every, fg.EveryEpoch) else losses
    result = fit(plateau, losses=data, log_every=log_every, **length)
    assert result.history["reduce_on_plateau/scale"].tolist() == scales


@pytest.mark.parametrize(
    ("every", "length", "message"),
    [
        (
            3,
            {"steps": 6},
            "'train/loss' decides at step 3, and no metric window ends there: log at",
        ),
        (fg.At(2, 5), {"steps": 6}, "decides at step 5"),
        (fg.EveryEpoch(), {"epochs": 2}, "decides at step 3"),
        (fg.AtStart() | fg.Every(2), {"steps": 6}, "decides at step 0"),
    ],
)
def test_a_decision_where_no_window_ends_is_refused_before_the_first_step(
    every: Any, length: dict[str, int], message: str
) -> None:
    steps: list[int] = []
    plugins = [
        ReduceOnPlateau("train/loss", every),
        fg.LambdaPlugin(every={1: lambda run: steps.append(run.step)}),
    ]
    with pytest.raises(ConfigurationError, match=message):
        fit(*plugins, losses=[1.0] * 3, log_every=2, **length)
    assert not steps


def test_a_trial_decides_at_its_last_step_where_everything_is_done() -> None:
    plateau = ReduceOnPlateau("train/loss", 3)
    result = fit(plateau, losses=[1.0] * 3, log_every=2, fast_dev_run=1, steps=6)
    assert result.history.steps("reduce_on_plateau/scale").tolist() == [1]


@pytest.mark.full
def test_a_value_of_an_earlier_step_is_refused() -> None:
    """Where an evaluator runs is known before the first step, where other plugins report is not,
    nor where an epoch of unknown length ends."""
    test = Evaluator("test", every=2, fn=lambda state, step: {"loss": 1.0})
    with pytest.raises(ConfigurationError, match="step 3, and 'test' is not evaluated there"):
        fit(test, ReduceOnPlateau("test/loss", 3), losses=[1.0], steps=4)
    report = fg.LambdaPlugin(
        every={fg.At(1): lambda run: run.report_evaluation("own", {"loss": 1})}
    )
    with pytest.raises(ConfigurationError, match="Its newest value is of step 1"):
        fit(report, ReduceOnPlateau("own/loss", 2), losses=[1.0], steps=2)

    class Unknown:
        """Three batches an epoch, of which it does not tell."""

        def __iter__(self) -> Any:
            return iter([np.ones(2, np.float32)] * 3)

    plateau = ReduceOnPlateau("train/loss", fg.EveryEpoch())
    engine = fg.Engine(epochs=2, log_every=2, autoload=False, plugins=[plateau])
    with pytest.raises(ConfigurationError, match=r"step 3, .* newest value is of step 2"):
        engine.fit(Falling, fg.DataSource(Unknown(), resume="replay"))
