"""Many metrics of one kind: they are merged as one vector, and each is what it is alone."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.metrics import Max, Mean, Sum

NAMES = [f"sum_{index}" for index in range(20)]
BATCHES = np.random.default_rng(0).integers(-9, 9, (8, 4, 20)).astype(np.float32)
BAD = 5
"""The index of the batch whose loss is not finite."""


class ManyMetrics(fg.Module):
    """Gives a sum and a largest value of each column of a batch, and a mean beside them."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.ones(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * jnp.mean(batch), metrics=self._measure(batch))

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics=self._measure(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)

    def _measure(self, batch: Any) -> dict[str, Any]:
        sums = {name: Sum.from_values(batch[:, index]) for index, name in enumerate(NAMES)}
        largest = {
            f"between_{index}": Max.from_values(batch[:, index]) for index in range(len(NAMES))
        }
        return {**sums, **largest, "single": Mean.from_values(batch)}


class Records:
    """Keeps the values of the records of training."""

    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    @fg.hookimpl
    def log_record(self, record: Any) -> None:
        if record.kind != "scalars":
            return
        if "single" in record.values:
            self.values.append(dict(record.values))


def compute_expected(batches: np.ndarray) -> dict[str, float]:
    """Return the metrics over these batches; sums of small integers are exact in any order."""
    columns = batches.reshape(-1, len(NAMES)).astype(np.float64)
    sums = {name: columns[:, index].sum() for index, name in enumerate(NAMES)}
    largest = {f"between_{index}": columns[:, index].max() for index in range(len(NAMES))}
    return {**sums, **largest, "single": float(columns.mean())}


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_each_of_many_metrics_is_computed_over_its_window_without_skipped_steps(
    steps_per_execution: int,
) -> None:
    batches = [np.array(batch) for batch in BATCHES]
    batches[BAD][0, 0] = np.inf
    records = Records()
    engine = fg.Engine(
        steps=8,
        log_every=4,
        on_nonfinite="skip",
        steps_per_execution=steps_per_execution,
        plugins=[records],
    )
    result = engine.fit(ManyMetrics, batches)

    expected = [compute_expected(BATCHES[:4]), compute_expected(np.delete(BATCHES, BAD, 0)[4:])]
    for values, window in zip(records.values, expected, strict=True):
        assert {name: values[name] for name in window} == pytest.approx(window, rel=1e-6)
    metrics: dict[str, Any] = result.state.metric_window.values.metrics
    totals = {name: float(metrics[name].total) for name in NAMES}
    assert totals == {name: expected[1][name] for name in NAMES}


def test_each_of_many_metrics_of_an_evaluation_is_computed_over_all_batches() -> None:
    engine = fg.Engine(steps=1)
    values = engine.evaluate(ManyMetrics(), list(BATCHES))
    expected = compute_expected(BATCHES)
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "policy",
    [  # XLA optimizes two programs each
        pytest.param("skip", marks=pytest.mark.slow),
        pytest.param("raise", marks=pytest.mark.slow),
    ],
)
def test_a_metric_more_costs_the_step_less_than_a_kernel_and_a_half(policy: Any) -> None:
    """Of which the metric itself, a sum over a batch, is one."""

    class Means(ManyMetrics):
        count: int

        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def _measure(self, batch: Any) -> dict[str, Any]:
            return {
                f"mean_{index}": Mean.from_values(batch[:, index % 20] * index)
                for index in range(self.count)
            }

    class Kernels:
        counts: tuple[int, ...] = ()

        @fg.hookimpl
        def on_compile(self, name: str, compiled: Any) -> None:
            self.counts += (compiled.as_text().count(" fusion("),)

    kernels = Kernels()
    for count in (32, 64):
        engine = fg.Engine(steps=1, on_nonfinite=policy, plugins=[kernels])
        engine.fit(Means(count), list(BATCHES))
    few, many = kernels.counts
    assert 32 < many - few < 48
