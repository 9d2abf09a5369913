"""Triggers and actions in a loop of one's own, and what such loops read (B7, G1, G20, G21)."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, PluginError
from fulgurite_checkpoint import Checkpointer
from models import Linear, regression

BATCHES = 2 * list(regression())[:2]

TRIGGERS = {
    "every": fg.Every(3),
    "start": fg.AtStart(),
    "end": fg.AtEnd(),
    "either": fg.At(2, 5) | fg.AtEnd(),
    "epoch": fg.EveryEpoch(),
}


def list_due(schedule: fg.ActionSchedule, first: int, last: int) -> dict[str, list[int]]:
    """The steps at which each action runs."""
    due: dict[str, list[int]] = {}
    for step in range(first, last + 1):
        for name, value in schedule.run(step, step).items():
            assert value == step
            due.setdefault(name, []).append(step)
    return due


def test_triggers_fire_as_in_a_fit_B7() -> None:
    class Noting:
        def __init__(self) -> None:
            self.due: dict[str, list[int]] = {}

        def note(self, name: str, run: fg.Run) -> None:
            self.due.setdefault(name, []).append(run.step)

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction(name, trigger, lambda run, name=name: self.note(name, run))
                for name, trigger in TRIGGERS.items()
            ]

    noting = Noting()
    fg.Engine(steps=8, plugins=[noting], autoload=False).fit(Linear, BATCHES)
    actions = [
        fg.ScheduledAction(name, trigger, lambda step: step) for name, trigger in TRIGGERS.items()
    ]
    due = list_due(fg.ActionSchedule(actions, steps=8, epoch_ends=(4, 8)), 0, 8)
    assert due == noting.due
    assert due["either"] == [2, 5, 8] and due["start"] == [0]
    # A loop that continues at step 4 makes a new schedule.
    later = list_due(fg.ActionSchedule(actions, steps=8, start_step=4, epoch_ends=(4, 8)), 5, 8)
    assert later == {
        name: [step for step in steps if step > 4] for name, steps in due.items() if max(steps) > 4
    }


def test_arguments_results_order_and_blame_G1() -> None:
    order: list[str] = []

    def act(name: str) -> Any:
        def action(value: int, *, factor: int = 1) -> int:
            order.append(name)
            return value * factor

        return action

    schedule = fg.ActionSchedule(
        [
            fg.ScheduledAction("save", 1, act("save"), stage="save"),
            fg.ScheduledAction("second", 1, act("second"), after=("first",)),
            fg.ScheduledAction("first", 1, act("first")),
            fg.ScheduledAction("third", 1, act("third")),
            fg.ScheduledAction("decide", 1, act("decide"), stage="decide"),
        ]
    )
    results = schedule.run(1, 7, factor=2)
    assert order == ["decide", "first", "second", "third", "save"]
    assert results == dict.fromkeys(order, 14)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as failure:
        fg.ActionSchedule([fg.ScheduledAction("broken", 2, fail)]).run(4)
    assert "action 'broken', step 4" in str(failure.value.__notes__)
    action = fg.ScheduledAction("twice", 1, fail)
    with pytest.raises(PluginError, match="two scheduled actions are called 'twice'"):
        fg.ActionSchedule([action, action])
    with pytest.raises(ConfigurationError, match="is not an action"):
        fg.ActionSchedule([fail])  # type: ignore[list-item]


def test_actions_are_added_to_a_schedule_in_use() -> None:
    order: list[tuple[int, str]] = []

    def act(name: str) -> Any:
        return lambda step: order.append((step, name))

    schedule = fg.ActionSchedule(
        [fg.ScheduledAction("late", 2, act("late"), stage="save")], steps=6
    )
    more = [
        fg.ScheduledAction("third", 3, act("third")),
        fg.ScheduledAction("first", 2, act("first"), before=("third",)),
        fg.ScheduledAction("end", fg.AtEnd(), act("end")),
    ]
    extend = fg.ScheduledAction("extend", fg.At(2), lambda step: schedule.add(*more))
    schedule.add(extend)
    for step in range(7):
        schedule.run(step, step)
    expected = [(2, "late"), (3, "third"), (4, "first"), (4, "late")]
    assert order == [*expected, (6, "first"), (6, "third"), (6, "end"), (6, "late")]
    with pytest.raises(PluginError, match="two scheduled actions are called 'late'"):
        schedule.add(fg.ScheduledAction("late", 1, act("other")))
    with pytest.raises(ConfigurationError, match="is not an action"):
        schedule.add(act("bare"))


@pytest.mark.full
def test_the_open_window_is_read_at_any_step_whatever_the_log_interval() -> None:
    read: dict[int, dict[str, Any]] = {}

    class Reader:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("read", 1, self.read)]

        def read(self, run: fg.Run) -> None:
            read[run.step] = run.state.metric_window.read()

    fg.Engine(steps=4, log_every=3, plugins=[Reader()], autoload=False).fit(Linear, BATCHES)
    plain = fg.Engine(steps=4, log_every=1, plugins=[], autoload=False).fit(Linear, BATCHES)
    losses = plain.history["train/loss"]
    for step, expected in ((1, losses[:1]), (2, losses[:2])):
        assert read[step]["loss"] == pytest.approx(expected.mean(), rel=1e-6)
        average = plain.history["train/loss_average"][step - 1]
        assert read[step]["loss_average"] == average


@pytest.mark.full
def test_metrics_of_two_windows_are_merged_by_hand() -> None:
    data = regression(24)
    engine = fg.Engine(steps=3, plugins=[], autoload=False)
    state = engine.init_state(Linear, data)
    assert state.metric_window.read_metrics() == {}
    windows: list[dict[str, Any]] = []
    for step, batch in enumerate(engine.iter_batches(data), 1):
        state, _ = engine.step(state, batch)
        if step > 1:
            windows.append(state.metric_window.read_metrics())
            state = state.replace(metric_window=state.metric_window.close())
    assert state.metric_window.read_metrics() == {}
    first, second = windows
    assert first.keys() == {"loss", "error", "batch_loss", "loss_average"}
    # The first window has two steps, the second one.
    losses = fit_by_hand(list(engine.iter_batches(data)))
    merged = first["error"].merge(second["error"])
    assert isinstance(merged, fg.metrics.Mean)
    assert merged.compute() == pytest.approx(np.mean(losses), rel=1e-5)
    assert first["error"].compute() == pytest.approx(np.mean(losses[:2]), rel=1e-5)
    assert second["batch_loss"].compute() == pytest.approx(losses[2], rel=1e-5)


def test_epoch_and_durations_are_values_G21() -> None:
    epochs: list[tuple[int, int]] = []
    engine = fg.Engine(
        epochs=2,
        plugins=[fg.LambdaPlugin(every={1: lambda run: epochs.append((run.step, run.epoch))})],
        autoload=False,
    )
    result = engine.fit(Linear, BATCHES[:2])
    assert epochs == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert len(result.timings.step_durations) == 4 and min(result.timings.step_durations) > 0


@pytest.mark.full
def test_metrics_of_training_begin_anew_G21() -> None:
    """The window of steps 1 to 4 holds steps 3 and 4 alone."""
    batches = BATCHES

    def fit(reset_at: int | None) -> fg.FitResult:
        plugins = [] if reset_at is None else [fg.LambdaPlugin(every={fg.At(reset_at): reset})]
        engine = fg.Engine(steps=4, log_every=4, plugins=plugins, autoload=False)
        return engine.fit(Linear, BATCHES)

    def reset(run: fg.Run) -> None:
        run.reset_train_metrics()

    plain = fg.Engine(steps=4, log_every=1, plugins=[], autoload=False).fit(Linear, batches)
    losses = plain.history["train/loss"]
    assert fit(None).history["train/loss"][0] == pytest.approx(losses.mean(), rel=1e-6)
    second = fit(2)
    assert second.history["train/loss"][0] == pytest.approx(losses[2:].mean(), rel=1e-6)
    assert second.history["train/loss_average"][0] == pytest.approx(losses[2:].mean(), rel=1e-6)
    assert jax.tree.all(jax.tree.map(np.array_equal, second.module.weight, plain.module.weight))


class Writer:
    """Tells others what it has seen."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("write", 1, self.write)]

    def write(self, run: fg.Run) -> None:
        shared = run.shared.setdefault("writer", {})
        shared.setdefault("steps", []).append(run.step)
        shared["function"] = self.write  # no JSON: for this process alone


class Reader:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("read", 1, self.read, after=("write",))]

    def read(self, run: fg.Run) -> None:
        assert callable(run.shared["writer"]["function"])
        self.seen.append(list(run.shared["writer"]["steps"]))


@pytest.mark.full
def test_plugins_share_what_survives_a_resume_G20(tmp_path: Path) -> None:
    def fit(steps: int) -> Reader:
        reader = Reader()
        plugins = [Writer(), reader, Checkpointer(every=1)]
        engine = fg.Engine(steps=steps, run_dir=tmp_path / "run", plugins=plugins, autoload=False)
        engine.fit(Linear, BATCHES, resume="auto")
        return reader

    assert fit(2).seen == [[1], [1, 2]]
    assert fit(4).seen == [[1, 2, 3], [1, 2, 3, 4]]


def test_the_result_holds_what_plugins_shared_and_the_start_of_a_fit_knows_the_data() -> None:
    class Split:
        train = BATCHES

    class Data:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            run.shared["data"] = {"source": run.data}

    for data in (BATCHES, Split()):
        writer = Writer()
        engine = fg.Engine(steps=2, plugins=[writer, Data()], autoload=False)
        shared = engine.fit(Linear, data).shared
        assert shared["writer"] == {"steps": [1, 2], "function": writer.write}
        assert shared["data"]["source"] is BATCHES
    assert fg.Engine(steps=1, plugins=[], autoload=False).fit(Linear, BATCHES).shared == {}


def fit_by_hand(batches: list[Any]) -> list[Any]:
    """The losses of plain gradient descent on `Linear`, in JAX alone."""

    @jax.jit
    def step(weight: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        def compute_loss(weight: jax.Array) -> jax.Array:
            return ((batch["x"] @ weight - batch["y"]) ** 2).mean()

        loss, gradient = jax.value_and_grad(compute_loss)(weight)
        return weight - 0.1 * gradient, loss

    weight = jnp.zeros(3)
    losses = []
    for batch in batches:
        weight, loss = step(weight, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.full
@pytest.mark.parametrize("on_device", [False, True])
def test_batches_on_devices_are_those_of_a_fit_epoch_after_epoch(on_device: bool) -> None:
    data = fg.ArrayData(regression(22).arrays, 8, shuffle=True, on_device=on_device)
    engine = fg.Engine(epochs=3, seed=5, log_every=1, autoload=False)
    batches = [
        batch for epoch in range(3) for batch in data.device_put(epoch=epoch, seed=engine.seed)
    ]
    # In the order that is documented, by NumPy alone.
    expected = []
    for epoch in range(3):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([5, epoch])))
        order = generator.permutation(22)
        expected += [data.arrays["x"][order[low : low + 8]] for low in range(0, 22, 8)]
    assert [batch["x"].tolist() for batch in batches] == [rows.tolist() for rows in expected]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batches))
    result = engine.fit(Linear, data)
    losses = fit_by_hand(batches)
    assert result.history["train/loss"].tolist() == pytest.approx(losses, rel=1e-6)
    # A later fit is of another order, and so a loop that says where it continues.
    later = engine.iter_batches(data, epochs=1, start_step=9)
    again = data.device_put(epoch=0, seed=(5, 9))
    assert [batch["x"].tolist() for batch in later] == [batch["x"].tolist() for batch in again]
    # A source with a seed of its own needs the epoch alone.
    seeded = fg.ArrayData(data.arrays, 8, shuffle=True, seed=5)
    assert [batch["x"].tolist() for batch in seeded.device_put(epoch=2)] == [
        rows.tolist() for rows in expected[6:]
    ]


def test_an_order_that_was_not_named_is_refused() -> None:
    data = fg.ArrayData(np.arange(8), 4, shuffle=True)
    calls: list[Any] = [{}, {"epoch": 0}, {"seed": 1}]
    for source in (data, fg.DataSource(data)):
        for arguments in calls:
            with pytest.raises(ConfigurationError, match=r"device_put\(epoch=epoch, seed=engine"):
                source.device_put(**arguments)
    with pytest.raises(ConfigurationError, match=r"device_put\(epoch=epoch"):
        fg.ArrayData(np.arange(8), 4, shuffle=True, seed=1).device_put()
    for epoch in (-1, 0.5):
        with pytest.raises(ConfigurationError, match="epoch is"):
            data.device_put(epoch=epoch, seed=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a list, which knows itself what comes next"):
        fg.DataSource([np.zeros(2)]).device_put(epoch=1)
    # Without shuffling every epoch is the same.
    plain = fg.ArrayData(np.arange(8), 4)
    batches = [list(plain.device_put()), list(plain.device_put(epoch=3, seed=1))]
    assert [[batch.tolist() for batch in part] for part in batches] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    ] * 2
