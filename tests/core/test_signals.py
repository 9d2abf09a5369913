"""Signals to a program with several fits: one within another, and one after another."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite_evaluators import Evaluator
from fulgurite_testing.memory import InMemoryCheckpointer
from models import Act, Counting, Events, numbers

DATA = numbers([0], [0])


def terminate(run: fg.Run | None = None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fit(*plugins: Any, **options: Any) -> fg.FitResult:
    """Trains `Counting`, whose weight counts its updates downwards."""
    steps = options.pop("steps", 3000)
    engine = fg.Engine(steps=steps, plugins=plugins, autoload=False, log_every=None)
    return engine.fit(Counting, DATA, **options)


@contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in numbers or (signal.SIGTERM,)}
    try:
        yield
    finally:
        for number, previous in former.items():
            assert signal.getsignal(number) is handler
            signal.signal(number, previous)


# --- one fit within another -----------------------------------------------------------------------


class Probe:
    """Trains another model of 3000 steps, in which SIGTERM comes after 100 in the first process."""

    def __init__(self) -> None:
        self.stops: list[str | None] = []
        self.updates: list[float] = []
        self.is_first_process = True

    def train(self, *_: Any) -> float:
        signals = [Act(fg.At(100), terminate)] if self.is_first_process else []
        self.is_first_process = False
        memory = InMemoryCheckpointer()
        try:
            result = fit(memory, *signals)
        finally:
            self.stops.append("stopped" if min(memory.checkpoints) < 3000 else None)
        self.updates.append(-float(result.module.weight))
        return self.updates[-1]

    def train_at_20(self, run: fg.Run) -> None:
        if run.step == 20:
            run.log_scalars("probe", {"updates": self.train()})


NESTINGS: dict[str, Callable[[Probe], Any]] = {
    "action": lambda probe: Act(fg.At(20), probe.train_at_20),
    "decision": lambda probe: fg.LambdaPlugin(every={fg.At(20): probe.train_at_20}),
    "end of an epoch": lambda probe: fg.LambdaPlugin(
        on_epoch_end=lambda run, epoch: probe.train_at_20(run)
    ),
    "evaluator": lambda probe: Evaluator(
        "probe", fn=lambda *_: {"updates": probe.train()}, every=fg.At(20)
    ),
}


@pytest.mark.variants("full")
@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_signal_in_an_inner_fit_stops_both_and_the_resumed_run_does_it_again(
    nesting: str,
) -> None:
    """3000 steps and 3000 steps; nothing of a probe with 100 updates is recorded."""
    probe, memory = Probe(), InMemoryCheckpointer()
    stopped = fit(NESTINGS[nesting](probe), memory)
    assert (stopped.stop_reason, float(stopped.module.weight)) == ("SIGTERM", -20)
    assert probe.stops == ["stopped"] and probe.updates == []
    assert "probe" not in stopped.metrics and list(memory.checkpoints) == [20]
    resumed = fit(NESTINGS[nesting](probe), memory, steps=40, resume="latest")
    assert (resumed.stop_reason, float(resumed.module.weight)) == (None, -40)
    assert probe.updates == [3000.0]
    history = [(record.step, record.values) for record in resumed.history.records]
    assert (20, {"updates": 3000.0}) in history


def test_three_fits_within_each_other_stop_from_the_inside_out() -> None:
    order: list[str] = []

    def nest(depth: int) -> None:
        ends = fg.LambdaPlugin(
            on_fit_end=lambda result: order.append(f"{depth} at {result.state.step}")
        )
        act = Act(fg.At(depth), lambda run: nest(depth + 1) if depth < 3 else terminate())
        result = fit(act, ends)
        order.append(f"{depth} returned {result.stop_reason}")

    nest(1)
    assert order[0].startswith("3 at ") and order[1:] == ["2 at 2", "1 at 1", "1 returned SIGTERM"]


@pytest.mark.full
def test_an_inner_fit_outside_of_actions_returns_and_the_outer_one_stops() -> None:
    """At the start it is called again when the run resumes; at the end everything is saved."""
    inner: list[fg.FitResult] = []

    def train(run: fg.Run) -> None:
        inner.append(fit(Act(fg.At(100), terminate)))

    outer = fit(fg.LambdaPlugin(on_fit_start=train))
    assert (outer.stop_reason, float(outer.module.weight)) == ("SIGTERM", 0)
    assert inner[0].stop_reason == "SIGTERM" and 100 <= -inner[0].module.weight <= 101
    outer = fit(fg.LambdaPlugin(on_fit_end=lambda run, result: train(run)), steps=5)
    assert (outer.stop_reason, float(outer.module.weight)) == (None, -5)
    assert inner[1].stop_reason == "SIGTERM"


def test_an_inner_fit_of_a_run_that_is_to_stop_takes_no_step() -> None:
    inner: list[fg.FitResult] = []

    def train(run: fg.Run, result: fg.FitResult) -> None:
        inner.append(fit())

    outer = fit(Act(fg.At(7), terminate), fg.LambdaPlugin(on_fit_end=train))
    assert outer.stop_reason == "SIGTERM"
    assert (inner[0].stop_reason, float(inner[0].module.weight)) == ("SIGTERM", 0)


@pytest.mark.full
def test_an_action_that_has_emitted_a_record_is_not_saved_half_done() -> None:
    """The run resumes from the previous checkpoint, with the records of an undisturbed one."""
    probe, memory = Probe(), InMemoryCheckpointer()

    def train(run: fg.Run) -> None:
        run.log_scalars("probe", {"begun": 1})
        run.log_scalars("probe", {"updates": probe.train()})

    plugins = [Act(fg.At(20), train), memory]
    saving = fg.LambdaPlugin(every={fg.At(15): fg.Run.save})
    stopped = fit(*plugins, saving)
    assert (stopped.stop_reason, list(memory.checkpoints)) == ("SIGTERM", [15])
    assert stopped.messages == [
        "a fit within an action was stopped by SIGTERM, after act.act had emitted exact records: "
        "nothing is saved at step 20, and the run resumes from the previous checkpoint"
    ]
    resumed = fit(*plugins, steps=30, resume="latest")
    records = [record.values for record in resumed.history.records if record.source == "probe"]
    assert records == [{"begun": 1}, {"updates": 3000.0}]


class Disturbed:
    """Evaluation data of 40 batches with something that happens before the sixth one is read, in
    each pass over it."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        self.disturb = disturb
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(40):
            if index == 5:
                self.disturb()
            self.num_read += 1
            yield {"x": np.arange(index, index + 4, dtype=np.float32)}


class Rooted(Counting):
    """Its evaluations have a number that is not a mean over examples, so that they have to say so."""

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"root": jnp.sqrt(jnp.mean(batch["x"] ** 2))})


class Telling:
    """Logs telemetry in each compilation, as a plugin that reports them does."""

    @fg.hookimpl
    def on_compile(self, run: fg.Run | None, name: str) -> None:
        if run is not None:
            run.log_scalars("compilations", {name: 1}, stream="telemetry")


def evaluate_disturbed(
    disturb: Callable[[], None], *plugins: Any
) -> tuple[Disturbed, InMemoryCheckpointer, fg.FitResult | Exception]:
    """Trains for 4 steps and evaluates after the second one."""
    data = Disturbed(disturb)
    memory = InMemoryCheckpointer()
    evaluator = Evaluator("val", fg.DataSource(data, prefetch=0), every=fg.At(2))
    engine = fg.Engine(steps=4, plugins=[*plugins, evaluator, memory], autoload=False)
    try:
        return data, memory, engine.fit(Rooted, DATA)
    except OSError as error:
        return data, memory, error


def test_an_evaluation_that_has_logged_telemetry_is_given_up_after_a_signal() -> None:
    """Telemetry may appear again, so the action can be done again: the signal comes in the sixth
    of 40 batches."""
    data, memory, result = evaluate_disturbed(terminate, Telling())
    assert isinstance(result, fg.FitResult)
    assert (result.stop_reason, list(memory.checkpoints)) == ("SIGTERM", [2])
    # One batch is looked at before training.
    assert data.num_read <= 7


def test_an_evaluation_that_fails_after_it_has_logged_telemetry_is_done_again() -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    pending: list[str] = []
    keep = fg.LambdaPlugin(on_exception=lambda run: pending.extend(run.snapshot().pending_actions))
    _, _, error = evaluate_disturbed(fail, Telling(), keep)
    assert (type(error), pending[:1]) == (OSError, ["evaluator:val.evaluate"])


def test_a_signal_in_an_evaluation_before_the_first_step_ends_the_fit_there() -> None:
    """It is part of no action that could be given up and done again."""
    start = fg.LambdaPlugin(on_fit_start=lambda run: run.evaluate("val"))
    _, memory, result = evaluate_disturbed(terminate, start)
    assert isinstance(result, fg.FitResult)
    assert (result.stop_reason, int(result.state.step)) == ("SIGTERM", 0)
    assert list(result.metrics) == ["val"] and list(memory.checkpoints) == [0]


def test_a_signal_during_the_last_step_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned end is reached, and what is due there done; the program is to end."""
    monkeypatch.undo()
    ends: list[int] = []
    end = Act(fg.AtEnd(), lambda run: ends.append(run.step), instance="end")
    result = fit(Act(fg.At(3), terminate), end, steps=4)
    assert (result.stop_reason, float(result.module.weight), ends) == (None, -4, [4])
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="SIGTERM stopped the fit"):
        fit(steps=1)


def test_a_request_to_stop_the_outer_fit_stops_the_inner_one() -> None:
    """As a time limit asks, from a thread of its own."""
    outer: list[fg.Run] = []

    def train(run: fg.Run) -> None:
        outer.append(run)
        fit(Act(fg.At(100), lambda _: outer[0].request_stop("no time left")))
        raise AssertionError("an action is given up with the fit in it")

    result = fit(Act(fg.At(20), train))
    assert (result.stop_reason, float(result.module.weight)) == ("no time left", -20)


def test_what_stops_an_inner_fit_alone_does_not_stop_the_outer_one() -> None:
    reasons: list[str | None] = []

    def train(run: fg.Run) -> None:
        inner = [
            fit(Act(fg.At(2), lambda _: fg.StopTraining("small loss"))),
            fit(Act(fg.At(2), lambda run: run.request_stop("enough"))),
        ]
        reasons.extend(result.stop_reason for result in inner)

    result = fit(Act(fg.At(20), train), steps=30)
    assert reasons == ["small loss", "enough"]
    assert (result.stop_reason, float(result.module.weight)) == (None, -30)


def test_an_inner_fit_in_a_thread_stops_too() -> None:
    reasons: list[str | None] = []

    def train(run: fg.Run) -> None:
        inner = lambda: reasons.append(fit(Act(fg.At(100), terminate)).stop_reason)  # noqa: E731
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    result = fit(Act(fg.At(20), train))
    assert (reasons, result.stop_reason) == (["SIGTERM"], "SIGTERM")


# --- a handler of the program ---------------------------------------------------------------------


def test_the_handler_of_the_program_is_called_at_once_and_stays() -> None:
    calls: list[tuple[int, int]] = []
    ends: list[int] = []

    def note(number: int, frame: Any) -> None:
        calls.append((number, len(ends)))

    with handling(note, signal.SIGTERM, signal.SIGINT):
        result = fit(
            Act(fg.At(7), terminate),
            Act(fg.AtEnd(), lambda run: ends.append(run.step), instance="end"),
        )
        assert (result.stop_reason, calls) == ("SIGTERM", [(signal.SIGTERM, 0)])
        fit(Act(fg.At(7), lambda run: signal.raise_signal(signal.SIGINT)))
        assert calls[1:] == [(signal.SIGINT, 0)]


def test_the_handler_of_the_program_is_called_once_for_fits_within_each_other() -> None:
    calls: list[int] = []
    probe = Probe()
    with handling(lambda number, frame: calls.append(number)):
        assert fit(NESTINGS["action"](probe)).stop_reason == "SIGTERM"
    assert calls == [signal.SIGTERM]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("terminated")])
def test_what_the_handler_of_the_program_raises_comes_when_everything_is_saved(
    error: BaseException,
) -> None:
    """`signal.signal(SIGTERM, lambda *_: sys.exit(3))` would lose what was trained."""

    def leave(number: int, frame: Any) -> None:
        raise error

    memory, events = InMemoryCheckpointer(), Events()
    with handling(leave), pytest.raises(type(error)) as raised:
        fit(Act(fg.At(7), terminate), memory, events)
    assert raised.value is error
    assert min(memory.checkpoints) in (7, 8)
    assert (len(events.results), events.exceptions) == (1, [])


# --- one fit after another ------------------------------------------------------------------------

FOLDS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import fulgurite as fg, numpy as np
from models import Act, Counting

number, mode = int(sys.argv[2]), sys.argv[3]
data = [np.zeros(1, np.float32)]
def stop(run):
    if fold == 0:
        os.kill(os.getpid(), number)

for fold in range(3):
    act = Act(fg.AtEnd() if mode == "late" else fg.At(7), stop)
    engine = fg.Engine(steps=20, plugins=[act], autoload=False)
    try:
        result = engine.fit(Counting, data)
    except BaseException:
        print("ended in fold", fold, flush=True)
        if mode != "catch":
            raise
        continue
    print(fold, result.stop_reason, flush=True)
    if mode == "forget":
        fg.forget_stop_request()
"""


def run_folds(number: int, mode: str) -> tuple[int, list[str], str]:
    """Runs a program of three folds; returns its exit code, and what it prints."""
    arguments = [sys.executable, "-c", FOLDS, str(Path(__file__).parent), str(int(number)), mode]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_a_loop_of_fits_ends_where_the_next_one_begins(number: int, code: int) -> None:
    """The fit that got the signal returns; the program, which does not look, gets it then."""
    returncode, lines, errors = run_folds(number, "loop")
    name = signal.Signals(number).name
    assert (returncode, lines) == (code, [f"0 {name}", "ended in fold 1"])
    assert f"{name} stopped the fit before this one" in errors
    assert "result.stop_reason" in errors and "fulgurite.forget_stop_request()" in errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        # It came after the last step: the fit has its planned end, and the program is to end.
        ("late", ["0 None", "ended in fold 1"]),
        # A program that catches it has been told.
        pytest.param("catch", ["0 SIGINT", "ended in fold 1", "2 None"], marks=pytest.mark.slow),
        ("forget", ["0 SIGINT", "1 None", "2 None"]),
    ],
)
def test_a_loop_of_fits_is_told_once(mode: str, lines: list[str]) -> None:
    assert run_folds(signal.SIGINT, mode)[1] == lines


def test_the_next_cell_of_a_notebook_trains_and_a_loop_in_the_same_cell_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IPython counts its cells."""
    monkeypatch.undo()
    shell = SimpleNamespace(execution_count=1)
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert fit(Act(fg.At(7), lambda run: signal.raise_signal(signal.SIGINT))).stop_reason
    shell.execution_count = 2
    assert float(fit(steps=3).module.weight) == -3
    assert fit(Act(fg.At(7), lambda run: signal.raise_signal(signal.SIGINT))).stop_reason
    with pytest.raises(KeyboardInterrupt, match="SIGINT stopped the fit before this one"):
        fit(steps=3)
    assert float(fit(steps=3).module.weight) == -3


class Together(fg.ProcessSync):
    """One of several processes: another one got SIGTERM at step 4, or was stopped in a fit before."""

    def __init__(self, stopped_before: str | None = None) -> None:
        self.stopped_before = stopped_before

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        return frozenset({"stop:SIGTERM"} if step == 4 else ())

    def all_gather(self, name: str, value: Any) -> list[Any]:
        return [value, self.stopped_before if name == "unanswered stop" else value]


class Processes:
    def __init__(self, sync: fg.ProcessSync) -> None:
        self.sync = sync

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return fg.SingleDevice(self.sync)


def test_several_processes_end_at_the_same_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them got the signal: one that continued alone would wait for the others."""
    monkeypatch.undo()
    assert fit(Processes(Together())).stop_reason == "SIGTERM"
    with (
        pytest.raises(SystemExit) as ended,
        pytest.warns(UserWarning, match="SIGTERM stopped the fit before this one"),
    ):
        fit(steps=3)
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt, match="SIGINT stopped the fit before this one"):
        fit(Processes(Together("SIGINT")), steps=3)


def test_a_fit_for_which_no_thread_can_be_started_leaves_the_signals_as_they_were() -> None:
    former = threading.stack_size(1 << 47)  # more than there are addresses
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            fit(steps=3)
    finally:
        threading.stack_size(former)
    assert signal.getsignal(signal.SIGTERM) is handler
    result = fit(Act(fg.At(2), terminate))
    assert result.stop_reason == "SIGTERM" and int(result.state.step) < 3000
    fg.forget_stop_request()


# --- processes that are forked within a fit -------------------------------------------------------

FORKED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import fulgurite as fg, numpy as np
from models import Act, Counting

def fork(run):
    begun, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, b"x")  # Python forgets signals that come while it forks
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

data = [np.zeros(1, np.float32)]
fg.Engine(steps=2, plugins=[Act(fg.At(1), fork)], autoload=False).fit(Counting, data)
"""


@pytest.mark.full
def test_a_process_that_is_forked_within_a_fit_is_ended_by_sigterm() -> None:
    """Who waits for it after SIGTERM, such as a pool of processes, would wait forever. Ctrl-C
    comes to it as well, and is the fit's."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{-signal.SIGTERM}\n", 0), done.stderr
