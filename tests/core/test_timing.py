"""Where the time went, and how fast training goes."""

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite import Timings
from fulgurite._src.timing import StepRate


def test_steps_per_second():
    rate = StepRate()
    assert rate(10, 1000.0) is None
    assert rate(133, 1010.0) == pytest.approx(12.3)


def test_there_is_no_rate_when_no_time_passed():
    rate = StepRate()
    rate(10, 1000.0)
    assert rate(20, 1000.0) is None
    assert rate(30, 1001.0) == 10


def test_time_of_a_nested_measurement_counts_only_there(monkeypatch: pytest.MonkeyPatch):
    times = iter(
        [0.0, 10.0, 11.0, 14.0, 16.0]
    )  # opened, outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr("fulgurite._src.timing.perf_counter", lambda: next(times))
    timings = Timings()
    with timings.time("outer"), timings.time("inner"):
        pass
    assert timings.seconds == {"inner": 3.0, "outer": 3.0}
    assert timings.calls == {"inner": 1, "outer": 1}


def test_the_time_of_a_block_that_fails_counts():
    timings = Timings()
    with pytest.raises(KeyError), timings.time("failing"):
        raise KeyError
    assert timings.calls["failing"] == 1


def test_median_step_time_is_that_between_due_points():
    timings = Timings()
    assert timings.median_step == 0.001 and timings.step_durations == []
    for steps, seconds in ((10, 1.0), (5, 1.0), (1, 3.0)):
        timings.add("wait", seconds / 2)
        timings.add("dispatch", seconds / 2, steps)
        timings.add("console.log_record", 7.0)
        timings.note_step_durations(steps)
    assert timings.median_step == 0.2
    assert timings.step_durations == [0.1, 0.2, 3.0]


@pytest.mark.full
def test_the_timings_of_a_fit_end_with_it():
    class Line(fg.Module):
        slope: jax.Array

        def training_step(self, batch: jax.Array, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean((self.slope * batch - 1) ** 2))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    data = [np.ones(4, np.float32)] * 5
    engine = fg.Engine(steps=5, autoload=False)
    result = engine.fit(Line(jnp.ones(())), data)
    seconds, total = dict(result.timings.seconds), result.timings.total
    assert sum(seconds.values()) <= total
    engine.evaluate(result, data)  # which compiles
    assert result.timings.seconds == seconds
    assert result.timings.total == total
