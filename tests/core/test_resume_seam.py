"""Going on from a checkpoint: what the core gives a checkpointer is enough for the same bits and
the same records.

The checkpointer here keeps snapshots in memory, as NumPy arrays and JSON texts: nothing else
survives a run.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    PluginError,
    StateError,
)
from fulgurite_runs import RunDirectory, RunPlugin
from models import Act, Counting, Linear, assert_same_bits, numbers, regression

LATEST = fg.CheckpointRef("memory")
SAME_RUN = fg.CheckpointRef(None)


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


@dataclass(frozen=True)
class MemorySnapshot:
    """A checkpoint: arrays by path, and the rest as JSON."""

    arrays: dict[str, np.ndarray]
    rest: str
    history: tuple[fg.Record, ...]


@dataclass(frozen=True, eq=False)
class Memory:
    """A checkpointer: saves at a trigger and at the end of a run, each step once."""

    every: int | fg.Trigger = 5
    snapshots: dict[int, MemorySnapshot] = field(default_factory=dict)
    requested: list[int] = field(default_factory=list)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        self.requested.append(run.step)
        if run.step in self.snapshots:
            return
        hooks, snapshot = run.engine.plugins.hooks, run.snapshot()
        hooks.on_save.call(run.step, run=run, step=run.step)
        positions = {
            logger.name: future.result()
            for logger, future in hooks.flush_logger.each(run.step, step=run.step)
        }
        rest = {
            "step_range": snapshot.step_range.to_json(),
            "position": snapshot.data_position,
            "pending": list(snapshot.pending_actions),
            "host": snapshot.host_states,
            "metrics": snapshot.metrics,
            "positions": positions,
        }
        paths = jax.tree_util.tree_leaves_with_path(eqx.filter(snapshot.state, eqx.is_array))
        arrays = {jax.tree_util.keystr(path): _copied(leaf) for path, leaf in paths}
        self.snapshots[run.step] = MemorySnapshot(arrays, json.dumps(rest), snapshot.history)

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef, template: fg.TrainState
    ) -> fg.Snapshot | None:
        if resume.optional and not self.snapshots:
            return None
        step = resume.step if isinstance(resume.step, int) else max(self.snapshots)
        snapshot = self.snapshots[step]
        rest = json.loads(snapshot.rest)
        state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _placed(snapshot.arrays, path, leaf), template
        )
        step_range = fg.StepRange.from_json(rest["step_range"])
        return fg.Snapshot(
            state,
            step_range,
            rest["position"],
            tuple(rest["pending"]),
            rest["host"],
            rest["metrics"],
            history=snapshot.history,
            run_dir=resume.path,
        )

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        positions = json.loads(self.snapshots[step].rest)["positions"]
        run.engine.plugins.hooks.rewind_logger.each(
            step, per_plugin=lambda logger: {"position": positions[logger.name]}
        )


def _copied(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def _placed(arrays: dict[str, np.ndarray], path: Any, like: Any) -> Any:
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    array = jnp.array(arrays[jax.tree_util.keystr(path)])
    return (
        jax.random.wrap_key_data(array)
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        else array
    )


class Learner(Linear):
    """Learns with Adam from inputs with noise, from a random start."""

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = jax.random.uniform(ctx.key(), batch["x"].shape)
        return super().training_step({"x": batch["x"] + noise, "y": batch["y"]}, ctx)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@dataclass(frozen=True)
class Average:
    """A slice of the state: an average of the weights, with a number drawn at each step."""

    @fg.hookimpl
    def init_plugin_state(self, module: Learner) -> Any:
        return {"average": module.weight, "drawn": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Learner, plugin_state: Any, ctx: fg.Context) -> Any:
        average = 0.9 * plugin_state["average"] + 0.1 * module.weight
        return module, {"average": average, "drawn": jax.random.uniform(ctx.key())}


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates `name` at a trigger; `on_batch` is called before each batch with its index."""

    trigger: int | fg.Trigger
    on_batch: Callable[[int], None] = lambda index: None
    name: str = "test"

    @property
    def instance(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(regression(20, 5)):
            self.on_batch(index)
            yield batch

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        # Its passes are counted.
        data = fg.DataSource(self, prefetch=0)
        return [fg.Evaluation(self.name, data, check_at_start=False)]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("evaluate", self.trigger, self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate(self.name)


@dataclass(frozen=True, eq=False)
class File:
    """A logger that can be rewound: one line for each exact record."""

    lines: list[str] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind in ("scalars", "text") and record.stream == "exact":
            self.lines.append(json.dumps(record.__dict__, default=np.ndarray.tolist))

    @fg.hookimpl
    def flush_logger(self, step: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(len(self.lines))
        return future

    @fg.hookimpl
    def rewind_logger(self, position: int) -> None:
        del self.lines[position:]


@dataclass(frozen=True, eq=False)
class Events:
    """Notes the events of a run."""

    calls: list[str] = field(default_factory=list)

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        self.calls.append(f"restored {step} at {run.step}, weight {run.state.module.weight.shape}")

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        self.calls.append(f"start at {run.step}")

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run, epoch: int) -> None:
        self.calls.append(f"epoch {epoch} ended at {run.step}")

    @fg.hookimpl
    def on_save(self, run: fg.Run, step: int) -> None:
        self.calls.append(f"saved {step} at {run.step}")

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        self.calls.append(f"end at {run.step}")


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


class Killed(Exception):
    """Ends a run."""


# --- the same bits --------------------------------------------------------------------------------


def crash(run: fg.Run) -> None:
    raise Killed


def stop(run: fg.Run) -> fg.StopTraining:
    return fg.StopTraining("stopped")


def training(
    snapshots: dict[int, MemorySnapshot], file: File, steps_per_execution: int, *others: Any
) -> fg.Engine:
    plugins = [Memory(snapshots=snapshots), Average(), Evaluator(4), file, *others]
    return engine(*plugins, steps=12, seed=3, steps_per_execution=steps_per_execution, log_every=4)


@pytest.fixture(scope="module")
def uninterrupted() -> Callable[[int], tuple[list[str], fg.FitResult]]:
    """The lines and the result of `training` that nobody interrupts."""

    @cache
    def run(steps_per_execution: int) -> tuple[list[str], fg.FitResult]:
        file = File()
        return file.lines, training({}, file, steps_per_execution).fit(
            Learner, regression(60, 8, shuffle=True)
        )

    return run


INTERRUPTIONS = [
    pytest.param(crash, 1, id="exception", marks=pytest.mark.slow),
    pytest.param(stop, 1, id="stop", marks=pytest.mark.slow),
    pytest.param(lambda run: interrupt(), 1, id="signal", marks=pytest.mark.full),
    pytest.param(crash, 8, id="fused", marks=pytest.mark.slow),
]


@pytest.mark.hook("on_restore", "restore_checkpoint")
@pytest.mark.full
@pytest.mark.parametrize(("how", "steps_per_execution"), INTERRUPTIONS)
def test_a_resumed_run_ends_with_the_same_bits(
    uninterrupted: Any, how: Callable[[fg.Run], Any], steps_per_execution: int
) -> None:
    """Saved at 5 and 10, logged and evaluated at 4, 8 and 12, killed at 7, continued from 5."""
    lines, whole = uninterrupted(steps_per_execution)
    data, file, snapshots, events = regression(60, 8, shuffle=True), File(), {}, Events()
    try:
        training(snapshots, file, steps_per_execution, Act(fg.At(7), how)).fit(Learner, data)
    except Killed:
        pass
    resumed = training(snapshots, file, steps_per_execution, events).fit(
        Learner, data, resume=fg.CheckpointRef("memory", step=5)
    )
    assert_same_bits(resumed.state, whole.state)
    assert file.lines == lines
    assert [json.loads(line)["step"] for line in lines] == [4, 4, 8, 8, 12, 12]
    assert resumed.metrics == whole.metrics
    assert events.calls[:2] == ["restored 5 at 5, weight (3,)", "start at 5"]


def test_records_before_and_after_join_to_those_of_a_whole_run() -> None:
    memory, data = Memory(), numbers([0], [0], [0])
    whole = engine(steps=12, log_every=4).fit(Counting(), data)
    first = engine(memory, Act(fg.At(7), lambda run: interrupt()), steps=12, log_every=4).fit(
        Counting(), data
    )
    second = engine(memory, steps=12, log_every=4).fit(Counting(), data, resume=LATEST)
    assert first.stop_reason == "SIGINT"
    assert second.history.records == whole.history.records
    assert first.history.records == whole.history.records[: len(first.history.records)]


def test_run_with_replaced_weights_continues_counting_and_resumes_exactly() -> None:
    """After step 4 it continues from the weights after step 2; an update makes the weight, which is
    the loss, 1 less."""
    snapshots: list[fg.TrainState] = []
    keep = Act(
        fg.At(2), lambda run: snapshots.append(jax.tree.map(jnp.copy, run.state)), instance="keep"
    )
    back = Act(fg.At(4), lambda run: fg.ReplaceState(snapshots.pop()), instance="back")
    memory, data = Memory(), numbers([0], [0])
    whole = engine(memory, keep, back, steps=10, log_every=3).fit(Counting(), data)
    assert whole.history.steps("train/loss").tolist() == [3, 6, 9, 10]
    assert whole.history["train/loss"].tolist() == pytest.approx(
        [(0 - 1 - 2) / 3, (-3 - 2 - 3) / 3, -5, -7]
    )
    assert int(whole.state.step) == 10 and float(whole.module.weight) == -8
    again = fg.CheckpointRef("memory", step=5)
    resumed = engine(memory, keep, back, steps=10, log_every=3).fit(Counting(), data, resume=again)
    assert_same_bits(resumed.state, whole.state)
    assert resumed.history.records == whole.history.records


@pytest.mark.full
def test_a_second_fit_is_resumed_as_a_second_fit() -> None:
    """Its step range and the order of its data depend on the step at which it began."""
    data, settings = regression(60, 8, shuffle=True), {"steps": 7, "log_every": None}

    def second(*plugins: Any) -> fg.FitResult:
        first = engine(**settings).fit(Learner, data)
        return engine(*plugins, **settings).fit(data=data, state=first.state)

    memory, step_ranges = Memory(), []
    with pytest.raises(Killed):
        second(memory, Act(fg.At(12), crash))
    look = Act(fg.AtEnd(), lambda run: step_ranges.append(run.step_range))
    resumed = engine(memory, look, **settings).fit(Learner, data, resume=LATEST)
    assert_same_bits(resumed.state, second().state)
    assert [(step_range.start, step_range.stop) for step_range in step_ranges] == [(7, 14)]


@pytest.mark.variants("full")
@pytest.mark.parametrize(("path", "stays"), [(None, True), ("run", True), ("other", False)])
def test_records_are_kept_when_resuming_from_the_runs_own_checkpoint(
    tmp_path: Path, path: str | None, stays: bool
) -> None:
    memory, run = Memory(), tmp_path / "run"
    engine(memory, RunPlugin(), Act(fg.At(7), stop), steps=12, run_dir=run).fit(
        Counting(), numbers([0])
    )
    (run / "records.jsonl").write_text("")
    reference = fg.CheckpointRef(path and tmp_path / path, 5)
    engine(memory, RunPlugin(), steps=12, run_dir=run).fit(
        Counting(), numbers([0]), resume=reference
    )
    assert (run / "records.jsonl").exists() == stays
    assert (run / "superseded" / "2" / "records.jsonl").exists() != stays


# --- the position of the data ---------------------------------------------------------------------


class Seeing(Counting):
    """Logs the number that each batch holds."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={"seen": fg.metrics.LastValue.from_values(batch[0])})
        )


class Counter:
    """A source that can continue in the middle of an endless epoch."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            self.count += 1
            yield np.full(1, self.count, np.float32)

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: fg.ArrayData(np.arange(7, dtype=np.float32), 1, shuffle=True),
    "list": lambda: numbers([0], [1], [2], [3]),
    "stateful": Counter,
    "prefetched": lambda: fg.DataSource(Counter(), prefetch=3),
}


@pytest.mark.parametrize("source", SOURCES)
def test_data_continues_after_the_last_batch_of_the_checkpoint(source: str) -> None:
    memory, make = Memory(), SOURCES[source]
    whole = engine(steps=12, log_every=1).fit(Seeing, make()).history["train/seen"].tolist()
    with pytest.raises(Killed):
        engine(memory, Act(fg.At(8), crash), steps=12, log_every=1).fit(Seeing, make())
    resumed = engine(memory, steps=12, log_every=1).fit(Seeing, make(), resume=LATEST)
    assert resumed.history["train/seen"].tolist() == whole
    assert float(resumed.module.weight) == -12


# --- step range and triggers ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Triggers:
    """Notes at which steps triggers fire."""

    fired: list[str] = field(default_factory=list)
    TRIGGERS: ClassVar[dict[str, fg.Trigger]] = {
        "start": fg.AtStart(),
        "end": fg.AtEnd(),
        "times": fg.EvenlySpaced(3),
        "epoch": fg.EveryEpoch(2),
        "process": fg.FirstStepsAfterStart(2),
    }

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(name, trigger, self.note(name))
            for name, trigger in self.TRIGGERS.items()
        ]

    def note(self, name: str) -> Callable[[fg.Run], None]:
        return lambda run: self.fired.append(f"{name} {run.step}")


@pytest.mark.parametrize("length", [{"steps": 12}, {"epochs": 4}])
def test_triggers_fire_where_they_would_have_fired(length: dict[str, int]) -> None:
    """The step range is that of the fit: three times in 12 steps, epochs counted from its beginning, one
    start, one end."""
    data, memory = numbers([0], [0], [0]), Memory()
    before, after = Triggers(), Triggers()
    stopped = engine(
        memory, before, Act(fg.At(6), lambda run: interrupt(signal.SIGTERM)), **length
    ).fit(Counting(), data)
    assert stopped.stop_reason == "SIGTERM"
    step = int(stopped.state.step)
    assert step in (6, 7)
    assert before.fired == ["start 0", "process 1", "process 2", "times 4", "epoch 6"]
    resumed = engine(memory, after, **length).fit(Counting(), data, resume=LATEST)
    clock_actions = [f"process {step + 1}", f"process {step + 2}"]
    assert sorted(after.fired) == sorted(
        [*clock_actions, "times 8", "end 12", "times 12", "epoch 12"]
    )
    assert (resumed.stop_reason, float(resumed.module.weight)) == (None, -12)


def test_epochs_are_counted_across_a_resume() -> None:
    memory, events = Memory(4), Events()
    data = numbers([0], [0], [0])
    with pytest.raises(Killed):
        engine(memory, Act(fg.At(5), crash), epochs=3).fit(Counting(), data)
    result = engine(memory, events, epochs=3).fit(Counting(), data, resume=LATEST)
    assert [line for line in events.calls if "epoch" in line] == [
        "epoch 1 ended at 6",
        "epoch 2 ended at 9",
    ]
    assert int(result.state.step) == 9


def test_a_stop_does_not_wait_for_a_dispatch_to_be_filled() -> None:
    """Asked to stop while the twelfth batch is made, where a dispatch takes eight: no more than
    that one is waited for, and the one after it, because the source is read one batch ahead."""
    drawn: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[np.ndarray]:
            for index in range(40):
                if index == 11 and not memory.snapshots:
                    interrupt(signal.SIGTERM)
                drawn.append(index)
                yield np.zeros(1, np.float32)

    memory = Memory(1000)
    result = engine(memory, steps=40, steps_per_execution=8).fit(
        Counting(), fg.DataSource(Source(), prefetch=0)
    )
    step = int(result.state.step)
    assert result.stop_reason == "SIGTERM" and list(memory.snapshots) == [step]
    assert step in (11, 12) and len(drawn) <= 13
    resumed = engine(memory, steps=40, steps_per_execution=8).fit(
        Counting(), fg.DataSource(Source(), prefetch=0), resume=LATEST
    )
    assert float(resumed.module.weight) == -40


# --- an evaluation that a stop request cuts off ---------------------------------------------------


def line_up(
    snapshots: dict[int, MemorySnapshot], file: File, before: Callable[[int], None], **settings: Any
) -> fg.Engine:
    """Evaluations, a window, an action and the end of an epoch at step 8; saves there too."""
    acts = Act(8, lambda run: run.log_text("act", {"weight": run.state.module.weight.tolist()}))
    evaluators = [
        Evaluator(4, name="first"),
        Evaluator(4, before, name="second"),
        Evaluator(fg.AtEnd(), before, name="last"),
    ]
    plugins = [file, *evaluators, acts, Memory(fg.Every(8), snapshots), Average()]
    return engine(*plugins, *settings.pop("plugins", []), steps=12, log_every=4, seed=1, **settings)


def interrupting(evaluation: int, batch: int) -> Callable[[int], None]:
    """Sends SIGINT before this batch of this evaluation, both counted from 0."""
    begun: list[int] = []

    def before(index: int) -> None:
        begun.extend([1] * (index == 0))
        if (len(begun) - 1, index) == (evaluation, batch):
            interrupt()

    return before


def never(index: int) -> None: ...


@pytest.fixture(scope="module")
def whole() -> tuple[list[str], fg.FitResult]:
    """The lines and the result of a run that nobody interrupts."""
    file = File()
    result = line_up({}, file, never).fit(Learner, regression(64, 8))
    return file.lines, result


@pytest.mark.full
@pytest.mark.parametrize("batch", [pytest.param(0, marks=pytest.mark.full), 3])
def test_pending_evaluation_runs_first_and_records_equal_those_of_a_whole_run(
    whole: Any, batch: int
) -> None:
    lines, result = whole
    snapshots: dict[int, MemorySnapshot] = {}
    file, data = File(), regression(64, 8)
    stopped = line_up(snapshots, file, interrupting(1, batch)).fit(Learner, data)
    assert (stopped.stop_reason, int(stopped.state.step)) == ("SIGINT", 8)
    assert json.loads(snapshots[8].rest)["pending"][:2] == ["evaluator:second.evaluate", "log"]
    assert json.loads(file.lines[-1])["source"] == "first"
    events = Events()
    resumed = line_up(snapshots, file, never, plugins=[events]).fit(Learner, data, resume=LATEST)
    assert file.lines == lines
    assert_same_bits(resumed.state, result.state)
    assert [line for line in events.calls if "epoch" in line] == ["epoch 0 ended at 8"]


@pytest.mark.full
def test_pending_evaluation_may_be_interrupted_again(whole: Any) -> None:
    snapshots: dict[int, MemorySnapshot] = {}
    file, data = File(), regression(64, 8)
    line_up(snapshots, file, interrupting(1, 1)).fit(Learner, data)
    again = line_up(snapshots, file, interrupting(0, 2)).fit(Learner, data, resume=LATEST)
    assert (again.stop_reason, int(again.state.step)) == ("SIGINT", 8)
    line_up(snapshots, file, never).fit(Learner, data, resume=LATEST)
    assert file.lines == whole[0]


@pytest.mark.full
def test_evaluation_interrupted_at_the_end_leaves_the_run_incomplete(
    whole: Any, tmp_path: Any
) -> None:
    snapshots: dict[int, MemorySnapshot] = {}
    file, data = File(), regression(64, 8)
    stopped = line_up(
        snapshots, file, interrupting(2, 1), plugins=[RunPlugin()], run_dir=str(tmp_path)
    ).fit(Learner, data)
    assert (stopped.stop_reason, int(stopped.state.step)) == ("SIGINT", 12)
    assert not RunDirectory(tmp_path).is_complete
    resumed = line_up(snapshots, file, never, plugins=[RunPlugin()], run_dir=str(tmp_path)).fit(
        Learner, data, resume=SAME_RUN
    )
    assert file.lines == whole[0]
    assert resumed.stop_reason is None
    assert RunDirectory(tmp_path).is_complete


@pytest.mark.full
def test_evaluation_of_an_interrupted_action_is_not_recorded_twice() -> None:
    class Both:
        """Runs two evaluations in one action."""

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("both", 4, self.both, "evaluate")]

        def both(self, run: fg.Run) -> None:
            run.evaluate("first")
            run.evaluate("second")

    def parts(
        snapshots: dict[int, MemorySnapshot], file: File, before: Callable[[int], None]
    ) -> fg.Engine:
        evaluators = [
            Evaluator(fg.At(99), name="first"),
            Evaluator(fg.At(99), before, name="second"),
        ]
        return engine(
            file, *evaluators, Both(), Memory(fg.At(4), snapshots), steps=5, log_every=None
        )

    whole_file, file, snapshots = File(), File(), {}
    parts({}, whole_file, never).fit(Linear(), regression())
    parts(snapshots, file, interrupting(0, 2)).fit(Linear(), regression())
    parts(snapshots, file, never).fit(Linear(), regression(), resume=LATEST)
    assert file.lines == whole_file.lines


# --- what is saved --------------------------------------------------------------------------------


@pytest.mark.hook("save_checkpoint")
def test_run_is_saved_on_request_and_at_its_end() -> None:
    memory = Memory()
    engine(memory, Act(fg.At(3), fg.Run.save), steps=7).fit(Counting(), numbers([0]))
    assert memory.requested == [3, 5, 7]
    assert {
        step: float(snapshot.arrays[".module.weight"])
        for step, snapshot in memory.snapshots.items()
    } == {
        3: -3,
        5: -5,
        7: -7,
    }


def test_fast_dev_run_saves_nothing() -> None:
    memory = Memory(1)
    engine(memory, steps=7, fast_dev_run=2).fit(Counting(), numbers([0]))
    assert memory.requested == []


@pytest.mark.hook("on_save")
def test_checkpointer_reports_its_saves() -> None:
    events = Events()
    engine(Memory(3), events, steps=7, log_every=None).fit(Counting(), numbers(*[[0.0]] * 9))
    assert events.calls == [
        "start at 0",
        "saved 3 at 3",
        "saved 6 at 6",
        "saved 7 at 7",
        "end at 7",
    ]


@pytest.mark.full
def test_nothing_of_a_step_that_is_not_finite_is_saved() -> None:
    """The weight at step k is -k, and its logarithm plus three is infinite at 3."""

    class Logarithm(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight + 0 * jnp.log(self.weight + 3))

    memory = Memory(1)
    with pytest.raises(NonFiniteError, match="step 4"):
        engine(memory, steps=7).fit(Logarithm, numbers([0]))
    assert sorted(memory.snapshots) == [1, 2, 3]


def test_a_save_comes_after_the_records_of_its_step() -> None:
    """Each step is slow, so that the window of a step is not yet computed when its actions run."""

    class Slow(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            product = jax.lax.fori_loop(0, 40, lambda _, x: x @ x / 300, jnp.ones((300, 300)))
            return fg.Output(self.weight + 0 * product.sum())

    file, observed = File(), []
    look = Act(2, lambda run: observed.append((run.step, len(file.lines))), "save")
    engine(file, look, steps=6, log_every=2).fit(Slow, numbers([0]))
    assert observed == [(2, 1), (4, 2), (6, 3)]


@pytest.mark.hook("flush_logger", "rewind_logger")
def test_logger_is_rewound_to_the_checkpoint() -> None:
    memory, file = Memory(4), File()
    with pytest.raises(Killed):
        engine(memory, file, Act(fg.At(7), crash), steps=8, log_every=1).fit(
            Counting(), numbers([0])
        )
    assert json.loads(memory.snapshots[4].rest)["positions"] == {"file": 4}
    assert [json.loads(line)["step"] for line in file.lines][:6] == [1, 2, 3, 4, 5, 6]
    engine(memory, file, steps=8, log_every=1).fit(Counting(), numbers([0]), resume=LATEST)
    assert [json.loads(line)["step"] for line in file.lines] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_no_record_reaches_a_logger_before_it_is_rewound() -> None:
    calls: list[str] = []

    class Telling:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "text":
                return
            calls.append("a notice")

        @fg.hookimpl
        def flush_logger(self, step: int) -> Future[None]:
            future: Future[None] = Future()
            future.set_result(None)
            return future

        @fg.hookimpl
        def rewind_logger(self, position: Any) -> None:
            calls.append("rewound")

    memory = Memory(3)
    parts = [memory, Telling(), Act(fg.EverySeconds(1e9), None, "log")]
    engine(*parts, steps=3).fit(Counting(), numbers([0]))
    calls.clear()
    engine(*parts, steps=5).fit(Counting(), numbers([0]), resume=LATEST)
    assert calls == ["rewound", "a notice"]


class Patience:
    """Keeps a count on the host."""

    state_version = 3

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.count = 0
        self.restored: list[Any] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "count", 1 if self.instance == "fast" else 2, self.increase, "decide"
            )
        ]

    def increase(self, run: fg.Run) -> None:
        self.count += 1

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"count": self.count}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        self.restored.append((state, version))
        self.count = state["count"]


@pytest.mark.hook("get_host_state", "set_host_state")
def test_host_state_of_plugins_is_restored() -> None:
    """Version and state go to the instance that they came from; one that was not there then gets
    nothing."""
    memory = Memory(4)
    with pytest.raises(Killed):
        engine(memory, Patience("fast"), Patience("slow"), Act(fg.At(7), crash), steps=9).fit(
            Counting(), numbers([0])
        )
    assert json.loads(memory.snapshots[4].rest)["host"] == {
        "patience:fast": {"version": 3, "state": {"count": 4}},
        "patience:slow": {"version": 3, "state": {"count": 2}},
    }
    fast, slow, new = Patience("fast"), Patience("slow"), Patience("new")
    engine(memory, new, fast, slow, steps=9).fit(Counting(), numbers([0]), resume=LATEST)
    assert (fast.restored, slow.restored, new.restored) == (
        [({"count": 4}, 3)],
        [({"count": 2}, 3)],
        [],
    )
    assert (fast.count, slow.count, new.count) == (9, 4, 2)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_states", "message"),
    [
        (
            {"patience:fast": {"version": 3, "state": {"number": 4}}},
            "plugin 'patience:fast' cannot restore the host state that the checkpoint of step 4 "
            "holds for it, of version 3 of that state: KeyError: 'count'. Resume from another",
        ),
        (
            {"fulgurite.shared": {"version": 1, "state": {"tuner": 3}}},
            "the checkpoint of step 4 holds {'tuner': 3} as run.shared, which is not a dictionary of",
        ),
    ],
)
def test_host_states_that_no_run_wrote_are_an_error(host_states: Any, message: str) -> None:
    memory = Memory(4)
    engine(memory, Patience("fast"), steps=4).fit(Counting(), numbers([0]))
    saved = memory.snapshots[4]
    rest = json.loads(saved.rest) | {"host": host_states}
    memory.snapshots[4] = replace(saved, rest=json.dumps(rest))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        engine(memory, Patience("fast"), steps=9).fit(Counting(), numbers([0]), resume=LATEST)


def test_without_a_checkpointer_nothing_can_be_resumed() -> None:
    with pytest.raises(
        PluginError,
        match="no plugin can restore memory: add the Checkpointer of fulgurite-checkpoint",
    ):
        engine(steps=2).fit(Counting(), numbers([0]), resume=LATEST)


def test_an_optional_checkpoint_may_be_missing() -> None:
    events = Events()
    optional = fg.CheckpointRef("memory", optional=True)
    result = engine(Memory(), events, steps=2, log_every=None).fit(
        Counting(), numbers([0, 0]), resume=optional
    )
    assert float(result.module.weight) == -2
    assert events.calls[0] == "start at 0"
    with pytest.raises(CheckpointError, match="found no checkpoint for memory"):
        engine(Nothing()).evaluate(Counting(), numbers([0]), weights=optional)


class Nothing:
    """A checkpointer without a checkpoint."""

    @fg.hookimpl
    def restore_checkpoint(self) -> None:
        return None


def test_checkpointer_that_returns_nothing_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="memory"):
        engine(Nothing(), steps=2).fit(Counting(), numbers([0]), resume=LATEST)


def test_a_failure_of_the_checkpointer_is_blamed() -> None:
    with pytest.raises(KeyError) as caught:
        engine(Memory(), steps=2).fit(
            Counting(), numbers([0]), resume=fg.CheckpointRef("memory", step=3)
        )
    assert any(
        note.startswith("plugin 'memory' (") and "hook restore_checkpoint" in note
        for note in caught.value.__notes__
    )


@pytest.mark.full
def test_a_checkpoint_of_other_plugins_is_an_error() -> None:
    memory = Memory(2)
    engine(memory, Average(), steps=2).fit(Learner, regression())

    class Forgetful(Memory):
        @fg.hookimpl
        def restore_checkpoint(
            self, resume: fg.CheckpointRef, template: fg.TrainState
        ) -> fg.Snapshot | None:
            snapshot = memory.restore_checkpoint(resume, template)
            assert snapshot is not None
            return replace(snapshot, state=snapshot.state.replace(plugin_states={}))

    with pytest.raises(StateError, match=r"does not fit.*plugin_states.*average"):
        engine(Forgetful(), Average(), steps=4).fit(Learner, regression(), resume=LATEST)


# --- weights of another form than a checkpoint ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class ForeignWeights:
    """Reads weights that are ones, of a path that ends with `.ones`; nothing of the model state."""

    sources: list[fg.CheckpointRef] = field(default_factory=list)

    @fg.hookimpl
    def read_weights(self, source: fg.CheckpointRef, module: Any) -> Any:
        self.sources.append(source)
        if not str(source.path).endswith(".ones"):
            return None
        return jax.tree.map(
            lambda leaf: jnp.ones(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf,
            module,
        )


@pytest.mark.full
@pytest.mark.hook("read_weights")
def test_weights_that_a_plugin_reads_begin_a_fit_and_are_evaluated_without_a_checkpointer() -> None:
    data = regression()
    foreign = ForeignWeights()
    engine = fg.Engine(steps=1, plugins=[foreign])
    model = Linear(key=jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, model)
    evaluated = engine.evaluate(Linear, data, weights="some.ones")
    assert evaluated == engine.evaluate(ones, data)
    begun = engine.fit(Linear, data, init_from="some.ones")
    expected = fg.Engine(steps=1).fit(ones, data)
    assert jnp.array_equal(begun.module.weight, expected.module.weight)
    assert {str(source.path) for source in foreign.sources} == {"some.ones"}
    with pytest.raises(ConfigurationError, match="leave view out"):
        engine.evaluate(Linear, data, weights=fg.CheckpointRef("some.ones", view="averaged"))
    with pytest.raises(PluginError, match="no plugin can restore some.zeros"):
        engine.evaluate(Linear, data, weights="some.zeros")


def test_a_run_resumes_in_no_other_dtype() -> None:
    with pytest.raises(ConfigurationError, match="a run resumes with its own: leave dtype out"):
        fg.Engine(steps=1).fit(Linear, regression(), resume=fg.CheckpointRef("a", dtype="match"))
