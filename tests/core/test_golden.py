"""The whole order of events of a run, as literal lists."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import pytest
from models import Counting, numbers

Calls = list[str]


@dataclass(frozen=True, eq=False)
class Watcher:
    """Notes every event."""

    calls: Calls

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        self.calls.append(f"{run.step}: fit starts")

    @fg.hookimpl
    def on_compile(self, name: str) -> None:
        self.calls.append(f"compiled {name}")

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run, epoch: int) -> None:
        self.calls.append(f"{run.step}: epoch {epoch} ended")

    @fg.hookimpl
    def on_evaluate_end(self, run: fg.Run, source: str, metrics: dict[str, Any]) -> None:
        self.calls.append(
            f"{run.step}: evaluation {source} ended with {metrics['updates']:.0f} updates"
        )

    @fg.hookimpl
    def on_save(self, run: fg.Run, step: int) -> None:
        self.calls.append(f"{run.step}: a checkpoint of {step} is written")

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        self.calls.append(f"{run.step}: watcher notices {type(exception).__name__}")
        raise ValueError("so is the next one")

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        self.calls.append(f"{run.step}: fit ended, {result.stop_reason}")


@dataclass(frozen=True, eq=False)
class Witness:
    """Notes what ends the run."""

    calls: Calls

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        self.calls.append(f"{run.step}: witness notices {type(exception).__name__}")


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates every 4 updates."""

    calls: Calls

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("test", numbers([0], [0]))]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("test", 4, self.test, "evaluate")]

    def test(self, run: fg.Run) -> None:
        self.calls.append(f"{run.step}: evaluator runs")
        run.evaluate("test")


@dataclass(frozen=True, eq=False)
class Saver:
    """Saves every 5 updates and at the end, each step once."""

    calls: Calls
    saved: list[int]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", 5, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        self.calls.append(f"{run.step}: saver is asked")
        if run.step not in self.saved:
            self.saved.append(run.step)
            run.engine.plugins.hooks.on_save.call(run.step, run=run, step=run.step)


@dataclass(frozen=True, eq=False)
class Actor:
    """Decides and acts every 5 updates, and looks at the newest window."""

    calls: Calls
    fails_at: int | None = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("act", fg.Every(5) | fg.At(6), self.act, "act"),
            fg.ScheduledAction(
                "decide",
                fg.Every(5),
                lambda run: self.calls.append(f"{run.step}: decides"),
                "decide",
            ),
            fg.ScheduledAction(
                "begin", fg.AtStart(), lambda run: self.calls.append(f"{run.step}: begins")
            ),
            fg.ScheduledAction(
                "end", fg.AtEnd(), lambda run: self.calls.append(f"{run.step}: comes to an end")
            ),
        ]

    def act(self, run: fg.Run) -> None:
        self.calls.append(
            f"{run.step}: acts, having seen the loss {run.metrics['train']['batch_loss']:.0f}"
        )
        if run.step == self.fails_at:
            raise RuntimeError("cannot act")


@dataclass(frozen=True, eq=False)
class Logger:
    """Notes every record, and may fail at one of a step."""

    calls: Calls
    instance: str
    fails_at: int | None = None

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "text":
            self.calls.append(f"{record.step}: {self.instance} logger takes {record.stream} text")
        if record.kind != "scalars":
            return
        names = "steps_per_second" if "steps_per_second" in record.values else record.source
        self.calls.append(f"{record.step}: {self.instance} logger takes {record.stream} {names}")
        if record.step == self.fails_at:
            raise OSError("disk full")


def plugins(calls: Calls, **settings: Any) -> list[Any]:
    return [
        Watcher(calls),
        Saver(calls, []),
        Actor(calls, **settings),
        Logger(calls, "failing", fails_at=5),
        Evaluator(calls),
        Logger(calls, "good"),
        Witness(calls),
    ]


WHOLE_RUN = """\
0: fit starts
0: begins
compiled step
4: evaluator runs
compiled evaluate.test
4: failing logger takes exact test
4: good logger takes exact test
4: evaluation test ended with 4 updates
4: epoch 0 ended
5: decides
5: failing logger takes exact train
5: good logger takes telemetry text
5: good logger takes exact train
5: acts, having seen the loss -4
5: saver is asked
5: a checkpoint of 5 is written
6: acts, having seen the loss -4
8: evaluator runs
8: good logger takes exact test
8: evaluation test ended with 8 updates
8: epoch 1 ended
10: decides
10: good logger takes telemetry steps_per_second
10: good logger takes exact train
10: acts, having seen the loss -9
10: comes to an end
10: saver is asked
10: a checkpoint of 10 is written
10: saver is asked
10: fit ended, None
"""


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_golden_order_of_a_whole_run(steps_per_execution: int) -> None:
    calls: Calls = []
    engine = fg.Engine(
        steps=10,
        log_every=5,
        steps_per_execution=steps_per_execution,
        plugins=plugins(calls),
        autoload=False,
    )
    with pytest.warns(UserWarning, match="logger 'logger:failing' failed"):
        result = engine.fit(Counting(), numbers([0], [0], [0], [0]))
    assert calls == WHOLE_RUN.splitlines()
    assert list(result.failures) == ["logger:failing"]


FAILING_RUN = """\
0: fit starts
0: begins
compiled step
4: evaluator runs
compiled evaluate.test
4: failing logger takes exact test
4: good logger takes exact test
4: evaluation test ended with 4 updates
4: epoch 0 ended
5: decides
5: failing logger takes exact train
5: good logger takes telemetry text
5: good logger takes exact train
5: acts, having seen the loss -4
5: saver is asked
5: a checkpoint of 5 is written
6: acts, having seen the loss -4
6: watcher notices RuntimeError
6: witness notices RuntimeError
"""


def test_golden_order_of_a_run_in_which_an_action_fails() -> None:
    calls: Calls = []
    engine = fg.Engine(steps=10, log_every=5, plugins=plugins(calls, fails_at=6), autoload=False)
    with (
        pytest.warns(UserWarning, match="logger 'logger:failing' failed"),
        pytest.raises(RuntimeError, match="cannot act"),
    ):
        engine.fit(Counting(), numbers([0], [0], [0], [0]))
    assert calls == FAILING_RUN.splitlines()
