"""Early stopping, time limits and spikes: when training ends, why, and with what."""

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from fulgurite_stopping.time_limit import parse_duration
from fulgurite_stopping.watch import SpikeState
from fulgurite_testing import InMemoryCheckpointer


class Counter(fg.Module):
    """A weight that grows by 1 with each update, and a loss that the batch says."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = jnp.mean(batch["loss"])
        return fg.Output(loss + self.weight - jax.lax.stop_gradient(self.weight))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(-1.0)


def losses(*values: float) -> list[dict[str, np.ndarray]]:
    """Return a batch for each loss."""
    return [{"loss": np.full(2, value, np.float32)} for value in values]


def find_stop(stopping: EarlyStopping, values: list[float], every: int = 1) -> int | None:
    """Return the number of the check that stops, from 1; None if none does."""
    for number, value in enumerate(values, 1):
        if stopping.update(value, number * every) is not None:
            return number
    return None


def evaluate(*values: float) -> Evaluator:
    """Return an evaluator `test` whose loss at each step is the next of the values."""
    return Evaluator("test", every=1, fn=lambda state, step: {"loss": values[step - 1]})


def fit(*plugins: Any, steps: int = 6, resume: Any = None, **settings: Any) -> fg.FitResult:
    engine = fg.Engine(steps=steps, log_every=1, autoload=False, plugins=plugins, **settings)
    return engine.fit(Counter, losses(*[1.0] * steps), resume=resume)


@pytest.mark.parametrize(
    ("options", "values", "check"),
    [
        ({"patience": 3}, [6, 5, 5, 5, 5, 5], 5),
        ({"patience": 3}, [6, 5, 6, 5, 5, 5], 5),
        ({"patience": 1}, [6, 5, 4, 4, 3, 3], 4),
        ({}, [8, 4, 2, 3, 4, 5, 8, 10], 6),
        ({"mode": "max"}, [0.5, 0.6, 0.6, 0.59, 0.6], 5),
        ({"threshold": 2.9}, [9, 8, 7, 6, 5, 6, 4, 3, 2, 1], 9),
        ({"divergence": 15.9}, [9, 4, 2, 16, 32], 4),
        ({}, [4, 3, float("nan")], 3),
        ({}, [4, 3, float("inf")], 3),
        ({"min_delta": 0.1, "patience": 2}, [1, 0.95, 0.85, 0.80, 0.76, 0.70], 5),
        ({"patience": 1, "check_finite": False}, [float("nan"), 1, float("nan")], 1),
        ({"patience": 2, "better": lambda value, best: value < 0.9 * best}, [10, 9.5, 8.9, 8.5, 8.1], 5),
    ],
    ids=["patience", "worse-once", "patience-of-one", "default", "max", "threshold", "divergence",
         "nan", "inf", "min-delta", "not-finite", "better"],
)  # fmt: skip
def test_the_check_that_stops(options: dict[str, Any], values: list[float], check: int) -> None:
    assert find_stop(EarlyStopping("test/loss", **options), values) == check


@pytest.mark.parametrize(
    ("options", "values", "check"),
    [
        ({}, [4, 3, float("-inf")], 3),
        ({"patience": 2, "check_finite": False}, [4, float("-inf"), 3.5, float("nan"), 3.6], 5),
        ({"patience": 2, "check_finite": False, "mode": "max"}, [float("inf"), 1, 0, 0.5], 4),
        ({"check_finite": False, "divergence": 9.0}, [4, float("nan")], 2),
        ({"check_finite": False, "threshold": 0.0}, [4, float("-inf"), -1], 3),
        ({"patience": 2, "min_delta": 0.1}, [-1, -1.05, -1.2, -1.25, -1.29], 5),
    ],
)
def test_what_is_not_finite_is_never_the_best_and_worse_than_any_number(
    options: dict[str, Any], values: list[float], check: int
) -> None:
    assert find_stop(EarlyStopping("test/loss", **options), values) == check


def test_nothing_is_decided_before_a_step() -> None:
    stopping = EarlyStopping("test/loss", patience=1, not_before=300)
    assert find_stop(stopping, [5, 6, 4, 4.5], every=100) == 4


def test_each_reason_is_its_own() -> None:
    reasons = {
        EarlyStopping("test/loss", patience=1, **options).update(value, 9)
        for options, value in [({"threshold": 2.0}, 1.0), ({"divergence": 9.0}, 10.0), ({}, np.nan)]
    }
    assert reasons == {
        "test/loss is 1, better than the threshold 2",
        "test/loss is 10, which is worse than 9",
        "test/loss is nan at step 9",
    }


@pytest.mark.full
def test_the_stop_is_the_planned_end_and_all_reasons_are_told() -> None:
    ends: list[int] = []
    plugins = [
        EarlyStopping("test/loss", patience=1),
        EarlyStopping("test/loss", threshold=5.5, name="goal"),
        fg.LambdaPlugin(every={fg.AtEnd(): lambda run: ends.append(run.step)}),
        evaluate(7, 6, 6, 5),
    ]
    result = fit(*plugins)
    assert ends == [3]
    assert result.stop_reason == ("test/loss has not improved for 1 check: it was 6 at step 2")
    plugins[1] = EarlyStopping("test/loss", threshold=6.5, not_before=3, name="goal")
    plugins[-1] = evaluate(6, 5, 5, 5)
    for both in (plugins, plugins[1::-1] + plugins[2:]):
        result = fit(*both)
        assert int(result.state.step) == 3
        assert sorted((result.stop_reason or "").split("; ")) == [
            "test/loss has not improved for 1 check: it was 5 at step 2",
            "test/loss is 5, better than the threshold 6.5",
        ]


@pytest.mark.full
def test_a_resumed_run_stops_at_the_same_step_for_the_same_reason() -> None:
    values = [6, 5, 5, 5, 5, 5]
    whole = fit(EarlyStopping("test/loss"), evaluate(*values))
    checkpoints = InMemoryCheckpointer()
    save = fg.LambdaPlugin(every={3: lambda run: run.save()})
    fit(EarlyStopping("test/loss"), evaluate(*values), checkpoints, save, steps=3)
    assert 3 in checkpoints.checkpoints
    stopping = EarlyStopping("test/loss")
    result = fit(stopping, evaluate(*values), checkpoints, save, resume=3)
    assert (int(result.state.step), result.stop_reason) == (5, whole.stop_reason)
    # The patience is that of the program now.
    patient = EarlyStopping("test/loss", patience=4)
    assert int(fit(patient, evaluate(*values), checkpoints, save, resume=3).state.step) == 6


@pytest.mark.full
def test_the_best_weights_come_back() -> None:
    stopping = EarlyStopping("test/loss", patience=2, restore_best=True)
    result = fit(stopping, evaluate(6, 5, 7, 8))
    assert (int(result.state.step), float(result.module.weight)) == (4, 2.0)
    (message,) = result.messages
    assert message.startswith("training ends with the weights of step 2, where test/loss was 5")
    # Also at the planned end.
    stopping = EarlyStopping("test/loss", restore_best=True)
    assert float(fit(stopping, evaluate(6, 5, 4, 8), steps=4).module.weight) == 3.0


@pytest.mark.full
def test_an_instance_counts_from_nothing_in_its_next_fit_also_in_one_that_resumes() -> None:
    stopping = EarlyStopping("test/loss", patience=2)
    for _ in range(2):
        assert int(fit(stopping, evaluate(5, 6, 7, 8, 9, 9)).state.step) == 3
    memory = InMemoryCheckpointer()
    fit(memory, evaluate(5, 6), steps=2)
    # What it resumes from was saved without early stopping.
    result = fit(memory, stopping, evaluate(5, 6, 8, 9, 9, 9), resume="latest")
    assert int(result.state.step) == 5
    assert "it was 8 at step 3" in str(result.stop_reason)


@pytest.mark.full
def test_the_direction_is_that_of_the_metrics_class_where_its_name_does_not_tell() -> None:
    class Gain(fg.metrics.Mean):
        higher_is_better = True

    class Cost(fg.metrics.Mean):
        higher_is_better = False

    def train(metric_class: Any) -> int:
        """Return the step at which a score of 0, 1, 2, 3 ends training."""

        class Scored(Counter):
            def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
                mean = fg.metrics.Mean.from_values(self.weight)
                output = super().training_step(batch, ctx)
                return output.replace(metrics={"score": metric_class(mean.total, mean.weight)})

        engine = fg.Engine(steps=4, log_every=1, autoload=False, plugins=[stopping])
        return int(engine.fit(Scored, losses(1, 1, 1, 1)).state.step)

    stopping = EarlyStopping("train/score", patience=1)
    assert train(Gain) == 4
    assert train(Cost) == 2
    with pytest.raises(FulguriteError, match="Neither its name nor its class tells"):
        fit(EarlyStopping("test/score"), Evaluator("test", every=1, fn=lambda state, step: {}))


def test_metrics_of_training_are_those_of_the_window_that_ends_at_the_step() -> None:
    engine = fg.Engine(
        steps=6, log_every=1, autoload=False, plugins=[EarlyStopping("train/loss", patience=1)]
    )
    result = engine.fit(Counter, losses(3, 2, 2, 1, 1, 1))
    assert int(result.state.step) == 3
    assert str(result.stop_reason).endswith("it was 2 at step 2")


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("values", "log_every", "patience", "weight", "message"),
    [
        ((5, 1, 3), 1, 9, 2.0, "of step 2, where train/loss was 1;"),
        ((5, 3, 1), 1, 9, 3.0, None),
        ((-5, -1, -7, -6), 1, 9, 3.0, "of step 3, where train/loss was -7;"),
        ((5, 5, 1, 2, 3, 3), 2, 9, 4.0, "of step 4, where train/loss was 1.5;"),
        ((5, 1, 3, 2, 2), 1, 2, 2.0, "of step 2, where train/loss was 1;"),
        ((5, 1, 3, 0, 0), 3, 9, 5.0, None),
    ],
)
def test_the_best_weights_by_a_metric_of_training_are_those_at_the_end_of_its_window(
    values: tuple[float, ...], log_every: int, patience: int, weight: float, message: str | None
) -> None:
    """The weight counts the updates; the last window, which ends with training, counts too."""
    stopping = EarlyStopping("train/loss", patience=patience, restore_best=True)
    engine = fg.Engine(steps=len(values), log_every=log_every, autoload=False, plugins=[stopping])
    result = engine.fit(Counter, losses(*values))
    assert float(result.module.weight) == weight
    assert (message is None) == (not result.messages)
    assert message is None or message in result.messages[0]


@pytest.mark.full
def test_a_window_without_an_update_is_no_check() -> None:
    engine = fg.Engine(
        steps=4,
        log_every=1,
        autoload=False,
        plugins=[EarlyStopping("train/loss", patience=1)],
        on_nonfinite="skip",
    )
    result = engine.fit(Counter, losses(3, float("nan"), 2, 1))
    assert (int(result.state.step), result.stop_reason) == (4, None)
    # Nor is the first one, nor the start, where no window has been.
    engine = fg.Engine(
        steps=4,
        log_every=fg.AtStart() | fg.Every(1),
        autoload=False,
        plugins=[EarlyStopping("train/loss", patience=1)],
        on_nonfinite="skip",
    )
    result = engine.fit(Counter, losses(float("nan"), 3, 4, 1))
    assert (int(result.state.step), result.stop_reason) == (
        3,
        "train/loss has not improved for 1 check: it was 3 at step 2",
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping("loss"), "SOURCE/NAME"),
        (lambda: EarlyStopping("test/loss", patience=0), "patience is 0"),
        (lambda: EarlyStopping("test/loss", min_delta=-1.0), "min_delta"),
        (lambda: EarlyStopping("test/accuracy", threshold=float("inf")), "threshold is inf"),
        (lambda: EarlyStopping("test/loss", threshold="0.5"), "threshold is '0.5'; it must be"),  # pyright: ignore
        (lambda: EarlyStopping("test/loss", divergence=float("nan")), "divergence is nan"),
        (lambda: EarlyStopping("test/loss", not_before=None), "not_before is None"),  # pyright: ignore
        (lambda: EarlyStopping("train/loss", every=2), "leave every out"),
        (lambda: EarlyStopping("test/loss", every=fg.EverySeconds(1)), "not seconds"),
        (
            lambda: EarlyStopping("test/loss", better=lambda a, b: a < b, min_delta=1.0),
            "replaces min_delta",
        ),
        (lambda: fg.Engine(steps=1, plugins=[EarlyStopping("test/loss")]), "evaluator:test"),
        (lambda: SpikeDetection("test/loss"), "train/NAME"),
        (lambda: SpikeDetection(window=0), "window is 0"),
        (lambda: SpikeDetection(factor="3"), "factor is '3'; it must"),  # pyright: ignore
        (lambda: SpikeDetection(action="wait"), "action"),  # pyright: ignore[reportArgumentType]
        (lambda: TimeLimit("6:00:00"), "DAYS:HOURS:MINUTES:SECONDS"),
        (lambda: TimeLimit(0), "limit is 0"),
        (lambda: TimeLimit([3]), r"limit is \[3\]; give seconds"),  # pyright: ignore
        (lambda: TimeLimit(None), "limit is None; give seconds"),  # pyright: ignore
    ],
)
def test_what_makes_no_sense_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("plugin", "state", "message"),
    [
        (EarlyStopping("test/loss"), None, "it is None, and should have best, best_step, num_fai"),
        (
            EarlyStopping("test/loss"),
            {"best": "1", "best_step": 2, "num_failed": 0},
            "best is '1', which a run never writes",
        ),
        (
            EarlyStopping("test/loss"),
            {"best": 1.0, "best_step": 2, "num_failed": -1},
            "num_failed is -1",
        ),
        (
            SpikeDetection(factor=2.0),
            {"num_spikes": 1, "looked_at": [0, True], "saved_steps": []},
            "looked_at is",
        ),
        (
            SpikeDetection(factor=2.0),
            {"num_spikes": 1, "looked_at": [4], "saved_steps": []},
            "looked_at is [4], which should be two steps",
        ),
        (TimeLimit("1h"), {"seconds": float("nan")}, "seconds is nan"),
    ],
)
def test_a_host_state_that_no_run_wrote_is_an_error(plugin: Any, state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plugin.set_host_state(state, version=1)


def test_durations_are_read_from_strings() -> None:
    days = timedelta(days=12, hours=34, minutes=56, seconds=65).total_seconds()
    assert parse_duration("12:34:56:65") == days
    assert parse_duration("7h30m") == parse_duration(timedelta(hours=7.5)) == 27_000
    assert parse_duration(10) == parse_duration("10s") == 10


@pytest.mark.parametrize("limit", [1e10, 1e300, timedelta.max])
def test_a_time_that_nobody_lives_to_see_is_no_limit(limit: Any) -> None:
    # No thread can wait that long: it would fail, which pytest makes an error.
    assert fit(TimeLimit(limit), steps=1).stop_reason is None


@pytest.mark.full
def test_the_time_is_counted_over_attempts() -> None:
    checkpoints = InMemoryCheckpointer()
    limit = TimeLimit(0.05)
    slow = fg.LambdaPlugin(every={1: lambda run: time.sleep(0.02)})
    result = fit(limit, slow, checkpoints, steps=500)
    assert result.stop_reason == "the time limit of 0:00:00.050000 is used up"
    step = int(result.state.step)
    assert 1 <= step < 500
    saved = checkpoints.checkpoints[step][0]
    # A limit that is used up: not one update, and the same state.
    again = fit(TimeLimit(0.05), slow, checkpoints, steps=500, resume="latest")
    assert (int(again.state.step), again.stop_reason) == (step, result.stop_reason)
    for path, array in checkpoints.checkpoints[step][0].items():
        np.testing.assert_array_equal(array, saved[path])
    # What is left of a larger one.
    larger = TimeLimit(100)
    larger.set_host_state({"seconds": 97.0}, 1)
    resumed = fit(larger, checkpoints, steps=step + 2, resume="latest")
    assert (int(resumed.state.step), resumed.stop_reason) == (step + 2, None)


def test_spikes_are_above_the_median() -> None:
    state = SpikeState.init(3)
    flags = []
    for step, value in enumerate([1.0, 3.0, 2.0, 4.0, 6.1, jnp.nan, 9.1], 1):
        state, is_spike = state.update(jnp.float32(value), jnp.int32(step), 2.0)
        flags.append(bool(is_spike))
    # Medians before each: 2 of (1, 3, 2), 3 of (4, 3, 2), 4 of (4, 6.1, 2) twice.
    assert flags == [False, False, False, False, True, False, True]
    assert (int(state.num_spikes), int(state.step), float(state.median)) == (2, 7, 4.0)


@pytest.mark.parametrize(
    ("values", "factor", "expected"),
    [
        ([-5.0] * 4 + [-5.0, -4.9, 4.9, 5.1], 3.0, [7]),
        ([-5.0, -6.0, -4.0, -5.0, 0.0, -5.0], 2.0, []),
        ([-5.0, -6.0, -4.0, -5.0, 0.1, -5.0], 2.0, [4]),
        ([0.1, -0.1, 0.1, -0.1, 0.1, -0.1, 0.5], 3.0, [6]),
        ([0.0, 0.0, 0.0, 0.3, 0.0], 2.0, []),
        ([2.0, 2.0, 2.0, 4.0, 4.1], 2.0, [4]),
        ([-1e-3, -1e3, -1e-3, 2e-3], 2.0, [3]),
    ],
)
def test_a_spike_is_far_above_losses_of_either_sign(
    values: list[float], factor: float, expected: list[int]
) -> None:
    state = SpikeState.init(3)
    spikes = []
    for index, value in enumerate(values):
        state, is_spike = state.update(jnp.float32(value), jnp.int32(index), factor)
        if is_spike:
            spikes.append(index)
    assert spikes == expected


@pytest.mark.parametrize("num_steps", [20, 18])
def test_a_constant_negative_loss_has_no_spikes_and_all_others_are_told(num_steps: int) -> None:
    plugin = SpikeDetection(factor=3.0, window=4, action="skip")
    engine = fg.Engine(
        steps=num_steps, log_every=2, autoload=False, plugins=[plugin], on_nonfinite="skip"
    )
    # Of the window that ends at step 18 no update is made: its only metric is the number of skips.
    result = engine.fit(Counter, losses(*[-5.0] * 16, 6.0, 7.0, 8.0, 9.0))
    assert float(result.module.weight) == num_steps - 2
    assert result.messages == [
        "train/loss rose to 7 at step 18; the median before it was -5 (the last of 2 spikes): the "
        "update was left out"
    ]


def spiking(action: Any, *plugins: Any, **settings: Any) -> fg.FitResult:
    """Train on losses of which the fifth is a spike, and the last are as before."""
    detection = SpikeDetection(factor=2.0, window=2, action=action)
    engine = fg.Engine(
        steps=8, log_every=1, autoload=False, plugins=[detection, *plugins], **settings
    )
    return engine.fit(Counter, losses(1, 1, 1, 1, 9, 1, 1, 1))


@pytest.mark.full
def test_a_spike_is_told() -> None:
    result = spiking("warn")
    assert result.messages == ["train/loss rose to 9 at step 5; the median before it was 1"]
    assert result.history["train/spike_detection/spikes"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert float(result.module.weight) == 8


@pytest.mark.full
def test_the_update_of_a_spike_is_left_out() -> None:
    result = spiking("skip", on_nonfinite="skip")
    assert (int(result.state.step), float(result.module.weight)) == (8, 7.0)
    assert result.metrics["train"]["skipped_steps"] == 1
    with pytest.raises(FulguriteError, match="on_nonfinite='skip'"):
        spiking("skip")


@pytest.mark.full
def test_a_spike_ends_training() -> None:
    result = spiking("stop")
    assert (int(result.state.step), result.stop_reason) == (
        6,
        "train/loss rose to 9 at step 5; the median before it was 1",
    )


@pytest.mark.full
def test_a_spike_rewinds_to_the_checkpoint_before() -> None:
    save = fg.LambdaPlugin(every={2: lambda run: run.save()})
    result = spiking("rewind", save, InMemoryCheckpointer())
    # Seen at step 6: back to the weight of step 4, and two more updates.
    assert (int(result.state.step), float(result.module.weight)) == (8, 6.0)
    assert "training continues with what it had at step 4" in result.messages[0]
    with pytest.raises(FulguriteError, match="no checkpoint before it"):
        spiking("rewind")


@pytest.mark.full
def test_a_second_rewind_passes_over_what_was_saved_after_the_first_spike() -> None:
    save = fg.LambdaPlugin(every={2: lambda run: run.save()})
    detection = SpikeDetection(factor=2.0, window=3, action="rewind")
    plugins = [detection, save, InMemoryCheckpointer()]
    engine = fg.Engine(steps=12, log_every=1, autoload=False, plugins=plugins)
    result = engine.fit(Counter, losses(1, 1, 1, 1, 1, 9, 1, 9, 1, 1, 1, 1))
    # The spike of step 6 is in the checkpoint of that step. Seen at 7 and 9: back to the weight of
    # step 4 both times, and three more updates.
    assert [message.rpartition(" ")[2] for message in result.messages] == ["4", "4"]
    assert float(result.module.weight) == 7.0


@pytest.mark.full
@pytest.mark.parametrize(("keep_period", "weight"), [(None, None), (2, 5.0)])
def test_a_rewind_takes_the_newest_checkpoint_that_is_still_there_and_waits_for_none_that_is_gone(
    tmp_path: Path, keep_period: int | None, weight: float | None
) -> None:
    saving = Checkpointer(every=1, max_to_keep=1, keep_period=keep_period)
    detection = SpikeDetection(factor=2.0, window=2, action="rewind")
    engine = fg.Engine(
        steps=12, log_every=3, run_dir=tmp_path, autoload=False, plugins=[detection, saving]
    )
    batches = losses(1, 1, 1, 1, 9, *[1.0] * 7)
    if weight is None:
        with pytest.raises(FulguriteError, match="keep more of them, by its max_to_keep"):
            engine.fit(Counter, batches)
        return
    # Seen at step 9, and step 3, which was the newest before the spike, is removed by then: back to
    # the weight of step 2, and three more updates.
    assert float(engine.fit(Counter, batches).module.weight) == weight


class TwoTerms(fg.Module):
    """Two loss terms that the batch says."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            losses={"steady": jnp.mean(batch["steady"]), "jumping": self.weight + batch["loss"][0]}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


@pytest.mark.full
def test_each_of_several_detections_acts_on_its_own_loss() -> None:
    detections = [
        SpikeDetection(f"train/{name}", factor=2.0, window=2, action="stop")
        for name in ("steady", "jumping")
    ]
    engine = fg.Engine(steps=8, log_every=1, autoload=False, plugins=detections)
    batches = [{**batch, "steady": np.ones(2)} for batch in losses(1, 1, 1, 9, 1, 1, 1, 1)]
    result = engine.fit(TwoTerms, batches)
    assert (int(result.state.step), result.stop_reason) == (
        5,
        "train/jumping rose to 9 at step 4; the median before it was 1",
    )
