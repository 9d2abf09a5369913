"""The progress line, the summary and the times: what they say, where they go, and that nothing is
left behind."""

import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, NonFiniteError
from fulgurite.plugins import register_secret
from fulgurite_progress import (
    ProgressBar,
    display,
    model_summary,
    parameter_table,
    plain,
    startup,
    timing_table,
)
from fulgurite_progress.line import Line
from fulgurite_progress.live_line import LiveLine, pause_outer_line
from fulgurite_progress.notebook import CellLine
from fulgurite_progress.numbers import format_count
from fulgurite_progress.path_cell import PathCell
from fulgurite_progress.plain import iter_intervals
from fulgurite_progress.screen import Screen
from fulgurite_progress.times import describe_activity, find_activity
from hypothesis import given, strategies as st
from rich.console import Console
from rich.text import Text


class Net(fg.Module):
    """Two layers of 3·4 + 4 and 4·2 + 2 numbers."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first, two = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(3, 4, key=first), eqx.nn.Linear(4, 2, key=two)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = (jax.vmap(lambda x: self.second(self.first(x)))(batch) ** 2).mean()
        return fg.Output(loss, metrics={LONG: loss})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


LONG = "a metric with a name that takes almost the whole width of a terminal"
BATCHES = [np.ones((2, 3), np.float32)] * 10


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def render_text(renderable: Any) -> str:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


LINE = Line(1200, 2000, 812.3, {"error": 0.9876, "loss": 0.25}, "compiling")


@pytest.mark.parametrize(
    "width, expected",
    [
        (
            120,
            "step 1,200/2,000  loss 0.25  error 0.9876  0:01 left  812 steps/s  compiling  ━━━━━━━━━━━━╌╌╌╌╌╌╌╌",
        ),
        (
            88,
            "step 1,200/2,000  loss 0.25  error 0.9876  0:01 left  812 steps/s  compiling  ━━━━━━╌╌╌╌",
        ),
        (80, "step 1,200/2,000  loss 0.25  error 0.9876  0:01 left  812 steps/s  compiling"),
        (70, "step 1,200/2,000  loss 0.25  error 0.9876  0:01 left  compiling  ━━━╌╌"),
        (38, "step 1,200/2,000  loss 0.25  compiling"),
        (37, "step 1,200/2,000  loss 0.25  ━━━━╌╌╌╌"),
        (16, "step 1,200/2,000"),
    ],
)
def test_line_shows_the_most_important_values_that_fit(width: int, expected: str):
    assert LINE.text(width).plain == expected


def test_the_line_of_a_fit_is_away_while_another_fit_runs_within_it(
    monkeypatch: pytest.MonkeyPatch,
):
    output = StringIO()

    def open_console() -> Screen:
        return Screen(file=output, force_terminal=True, force_interactive=True, width=100)

    monkeypatch.setattr("fulgurite_progress.plugin._open_console", open_console)
    outer = LiveLine(open_console(), lambda: Text("the outer line"), 60.0, stays=True)
    outer.start()
    with ProgressBar(refresh=60.0).around_fit(fg.Timings()):
        start = len(output.getvalue())
        time.sleep(0.1)  # six pictures of each of them
        assert "starting" in output.getvalue()[start:]
        assert "the outer line" not in output.getvalue()[start:]
        start = len(output.getvalue())
    assert "the outer line" in output.getvalue()[start:]
    outer.stop()
    start = len(output.getvalue())
    with ProgressBar(refresh=60.0).around_fit(fg.Timings()):
        pass
    assert "the outer line" not in output.getvalue()[start:]


def test_a_line_that_ends_while_it_is_away_is_shown_for_the_last_time():
    output = StringIO()
    console = Screen(file=output, force_terminal=True, force_interactive=True, width=100)
    line = LiveLine(console, lambda: Text("done"), 60.0, stays=True)
    line.start()
    with pause_outer_line():
        start = len(output.getvalue())
        line.stop()
    assert output.getvalue()[start:] == "done\n"


def test_a_number_behind_wide_characters_is_whole_or_not_there():
    # Each of these characters takes two columns.
    line = Line(1, 2, metrics={"loss": 0.1234, "精度指標": 0.9876})
    whole = "step 1/2  loss 0.1234  精度指標 0.9876"
    assert line.text(38).plain == whole and Text(whole).cell_len == 38
    assert line.text(37).plain == "step 1/2  loss 0.1234  ━━━━━━━╌╌╌╌╌╌╌"


def test_a_path_of_wide_characters_is_cut_on_the_left():
    path = "層['最初'].weight"
    assert Text(path).cell_len == 17
    output = StringIO()
    Console(width=13, file=output).print(PathCell(path))
    # Twelve columns, because the character before takes two.
    assert output.getvalue() == "…初'].weight\n"


@pytest.mark.parametrize(
    ("number", "expected"), [(999.4, "999 "), (999.6, "1 k"), (999.6e3, "1 M"), (12.3e6, "12.3 M")]
)
def test_a_count_has_three_digits(number: float, expected: str):
    assert format_count(number) == expected


def test_without_a_width_everything_but_the_bar_is_shown():
    everything = "step 1,200/2,000  loss 0.25  error 0.9876  0:01 left  812 steps/s  compiling"
    assert LINE.text().plain == everything


@pytest.mark.parametrize(
    "activity", ["", "compiling 13 s", "evaluating validation 2 s", "saving", "plugin tensorboard"]
)
def test_metrics_are_visible_in_80_columns_whatever_is_going_on(activity: str):
    metrics = {"loss": 0.04375, "accuracy": 0.9855}
    line = Line(13_002, 20_000, 4626.0, metrics, activity)
    assert line.text(80).plain.startswith("step 13,002/20,000  loss 0.04375  accuracy 0.9855")
    ended = Line(20_000, 20_000, 4626.0, metrics, "stopped: early_stopping", ended=True)
    assert ended.text(80).plain.endswith("accuracy 0.9855  stopped: early_stopping")


@pytest.mark.full
def test_the_rate_is_that_of_steps_and_not_of_compilation(monkeypatch: pytest.MonkeyPatch):
    """By a clock of its own, on which a batch takes a tenth of a second and compiling as long as
    1,000 of them."""
    now, traced, err = [0.0], list[int](), StringIO()
    monkeypatch.setattr(display, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(display, "monotonic", lambda: now[0])
    monkeypatch.setattr("fulgurite._src.timing.perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", err)

    class Slow(Net):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            traced.append(1)
            if len(traced) == 2:  # first on shapes, then to be compiled
                now[0] += 100
                assert any("compiling" in err.getvalue() or time.sleep(0.01) for _ in range(6000))
            return super().training_step(batch, ctx)

    def batches() -> Iterator[np.ndarray]:
        for _ in range(100):
            now[0] += 0.1
            yield BATCHES[0]

    engine(ProgressBar(summary=False, times=False), steps=100).fit(Slow, batches())
    last = err.getvalue().splitlines()[-1]
    assert (match := re.search(r"(\S+) steps/s", last)) and 9 <= float(match[1]) <= 11


@given(
    st.integers(1, 200),
    st.integers(0, 10**9),
    st.none() | st.integers(1, 10**9),
    st.none() | st.floats(1e-4, 1e6),
    st.dictionaries(st.text("abc/", min_size=1, max_size=30), st.floats()),
)
def test_a_line_is_never_wider_than_the_terminal(
    width: int, step: int, end: Any, rate: Any, metrics: Any
):
    assert LINE.text(width).cell_len <= width
    assert Line(step, end, rate, metrics, "evaluating test").text(width).cell_len <= width


@pytest.mark.parametrize(
    "rate, left, shown",
    [(0.5, 7200, "2 s/step"), (4.97, 725, "4.97 steps/s"), (0.1, 36000, "10 s/step")],
)
def test_rates_and_times(rate: float, left: int, shown: str):
    text = Line(0, 3600, rate).text(200).plain
    hours, minutes, seconds = (
        round(3600 / rate) // 3600,
        round(3600 / rate) // 60 % 60,
        round(3600 / rate) % 60,
    )
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    assert shown in text and f"{clock} left" in text


@pytest.mark.full
def test_two_runs_of_one_process_are_shown_on_standard_error(capsys: pytest.CaptureFixture[str]):
    trained = engine(ProgressBar(), steps=20)
    for _ in range(2):
        trained.fit(Net, fg.DataSource(BATCHES))
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(r"first +16 +64 B +128 B +float32", err) and re.search(
            r"second +10 +40 B +80 B", err
        )
        assert "Net: 26 parameters, 104 B; optimizer 212 B" in err  # and adam's count
        assert re.search(rf"step 20/20 .*loss .*{LONG} .*done", err)
        assert re.search(r"total +\d", err)
        assert not [
            thread for thread in threading.enumerate() if thread.name == "fulgurite progress"
        ]


def test_a_notebook_has_one_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch):
    class Handle:
        def update(self, text: Text | dict[str, str], *, raw: bool = False) -> None:
            shown.append(f"raw: {text}" if raw else f"update: {text}")

    def display(text: Text, *, display_id: bool) -> Handle:
        shown.append(f"new: {text}")
        return Handle()

    shown: list[str] = []
    monkeypatch.setattr("IPython.display.display", display)
    line = CellLine()
    line.show(Text("step 1"))
    line.show(Text("step 2"))
    line.hide()
    assert shown == ["new: step 1", "update: step 2", "raw: {'text/plain': '', 'text/html': ''}"]


def test_plain_lines_come_at_growing_intervals():
    assert list(islice(iter_intervals(), 9)) == [2, 4, 8, 16, 32, 64, 120, 120, 120]


class Heavy(Net):
    """A model whose first layer has a long path."""

    the_encoder_of_the_first_language_model: list[dict[str, eqx.nn.MLP]]

    def __init__(self, *, key: Any) -> None:
        super().__init__(key=key)
        self.the_encoder_of_the_first_language_model = [
            {"projection": eqx.nn.MLP(2, 2, 2, 1, key=key)} for key in jax.random.split(key)
        ]


def test_a_fit_says_that_it_starts_before_it_reads_a_batch(capsys: pytest.CaptureFixture[str]):
    shown: list[str] = []

    def batches() -> Iterator[Any]:
        shown.append(capsys.readouterr().err)
        yield from BATCHES

    engine(ProgressBar(), steps=2).fit(Net, fg.DataSource(batches(), prefetch=0))
    assert shown == ["starting\n"]
    assert "starting\n" not in capsys.readouterr().err


def test_a_pipe_gets_each_part_of_a_slow_start_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [0]

    def count_looks(timings: fg.Timings) -> Any:
        looks[0] += 1
        return find_activity(timings)

    def batches() -> Iterator[Any]:
        first = looks[0]
        while looks[0] < first + 10:
            threading.Event().wait(0.001)
        yield from BATCHES

    monkeypatch.setattr(startup, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(startup, "find_activity", count_looks)
    threads = threading.active_count()
    progress = ProgressBar(summary=False, times=False)
    engine(progress, steps=2).fit(Net, fg.DataSource(batches(), prefetch=0))
    lines = capsys.readouterr().err.splitlines()
    start = lines[: next(index for index, line in enumerate(lines) if line.startswith("step "))]
    assert start[:2] == ["starting", "reading the first batch"]
    assert "tracing" in start
    assert all(line != after for line, after in pairwise(start))
    assert threading.active_count() == threads


def test_a_fit_that_cannot_start_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown: list[str] = []

    def batches() -> Iterator[Any]:
        shown.append(terminal.getvalue())
        raise OSError("no such disk")
        yield

    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="no such disk"):
        engine(ProgressBar(), steps=2).fit(Net, fg.DataSource(batches(), prefetch=0))
    assert "starting" in shown[0]
    text = terminal.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert text.endswith("\x1b[2K"), "the line was erased"
    for thread in set(threading.enumerate()) - threads:  # one that ends takes a moment
        thread.join(timeout=60)
        assert not thread.is_alive(), thread


@pytest.mark.full
def test_an_evaluation_has_a_line_and_variants_of_the_loss_are_hidden(
    capsys: pytest.CaptureFixture[str],
):
    def train(progress: ProgressBar) -> tuple[list[str], fg.FitResult]:
        watching = Watching(progress)
        result = engine(progress, watching, steps=10).fit(Net, fg.DataSource(BATCHES))
        return capsys.readouterr().err.splitlines(), result

    lines, result = train(ProgressBar(times=False))
    first, second = result.state.module.first, result.state.module.second
    hidden = np.ones((2, 3)) @ np.asarray(first.weight).T + np.asarray(first.bias)
    output = hidden @ np.asarray(second.weight).T + np.asarray(second.bias)
    loss = f"{(output**2).mean():.4g}"
    assert [line for line in lines if "test" in line and "compiled" not in line] == [
        f"step 10, test: loss {loss}, {LONG} {loss}"
    ]
    assert not re.search("batch_loss|loss_average", "\n".join(lines))
    lines, _ = train(ProgressBar(hide=("loss",)))
    last = next(line for line in lines if line.endswith("done"))
    assert re.search(r"batch_loss \d.*loss_average \d", last) and "  loss " not in last
    assert any(line.startswith(f"step 10, test: {LONG} {loss}") for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("step", [10, 20])
def test_a_pipe_gets_nothing_twice(
    step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """While an action takes as long as twenty looks at it."""
    end = threading.Event()
    looks: list[int] = []

    class Lines(plain.PlainLines):
        def choose(self, line: Line, now: float, **details: Any) -> Line | None:
            if details["activity"] == "plugin slow":
                looks.append(line.step)
                if len(looks) == 20:
                    end.set()
                details["lasting"] = float(len(looks))
            # On a clock that stands still but for these looks.
            return super().choose(line, 10.0 * len(looks), **details)

    monkeypatch.setattr(display, "monotonic", lambda: 0.0)
    monkeypatch.setattr(display, "PlainLines", lambda now: Lines(0.0))
    monkeypatch.setattr(plain, "SHORTEST_PAUSE", 1e9)
    monkeypatch.setattr(display, "POLL_SECONDS", 0.001)
    slow = fg.LambdaPlugin("slow", every={fg.At(step): lambda run: end.wait(60) and None})
    progress = ProgressBar(summary=False, times=False)
    engine(progress, slow, steps=20, log_every=5).fit(Net, fg.DataSource(BATCHES))
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if "plugin slow" in line or line.endswith("done")]
    assert len(lines) == 2
    assert re.match(rf"step {step}/20 .*plugin slow", lines[0])
    assert step == 10 or "loss" not in lines[0], "the numbers of the last step are in the last line"
    assert re.match(r"step 20/20  loss .*  done$", lines[1])


class Named(fg.Module):
    """Has a secret where the terminal shows names."""

    layers: dict[str, eqx.nn.Linear]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = jax.vmap(self.layers[SECRET])(batch).mean()
        return fg.Output(loss, metrics={f"of {SECRET}": loss})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


SECRET = "canary-in-a-name"


@pytest.mark.full
def test_a_registered_secret_in_a_name_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    register_secret(SECRET)
    evaluating = fg.LambdaPlugin(
        every={2: lambda run: run.report_evaluation("val", {f"of {SECRET}": 1.0})}
    )
    model = Named({SECRET: eqx.nn.Linear(3, 2, key=jax.random.key(0))})
    engine(ProgressBar(), evaluating, steps=2).fit(model, BATCHES)
    shown = capsys.readouterr().err
    assert SECRET not in shown
    assert 'layers["***"]' in shown and "val: of *** 1" in shown


def test_long_paths_are_cut_on_the_left():
    def list_paths(table: Any, width: int) -> list[str]:
        console = Console(width=width, file=StringIO(), record=True)
        console.print(table)
        rows = console.export_text().splitlines()
        assert all(len(row) <= width for row in rows)
        return [row.split()[0] for row in rows if "float32" in row]

    module = Heavy(key=jax.random.key(0))
    state = engine(steps=1).init_state(module, fg.DataSource(BATCHES))
    for table in (model_summary(state), parameter_table(module)):
        paths = list_paths(table, 200)
        assert max(map(len, paths)) > 60 and "…" not in "".join(paths)
        for width in (60, 80):
            for path, cut in zip(paths, list_paths(table, width), strict=True):
                assert cut == path or (cut[0] == "…" and path.endswith(cut[1:]) and len(cut) >= 12)
        assert list_paths(table, 60) != paths
        assert list_paths(table, 120)[0] == paths[0]


def test_only_the_first_process_shows_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    engine(ProgressBar(), steps=2).fit(Net, fg.DataSource(BATCHES))
    assert capsys.readouterr().err == ""


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("variable, colored", [("IRRELEVANT", True), ("NO_COLOR", False)])
def test_colors_are_left_out_on_request(
    variable: str, colored: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    engine(ProgressBar(), steps=2).fit(Net, fg.DataSource(BATCHES))
    assert bool(re.search(r"\x1b\[3[0-9]m", sys.stderr.getvalue())) is colored  # type: ignore[attr-defined]
    assert "\x1b[1m" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Terminal())
    threads: list[str] = []

    def batches() -> Iterator[Any]:
        for batch in BATCHES:
            threads.extend(thread.name for thread in threading.enumerate())
            yield batch

    engine(ProgressBar(), steps=10).fit(Net, fg.DataSource(batches(), prefetch=0))
    assert "fulgurite progress" in threads
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and f"{LONG} " in text and re.search("step 10/10 .*done", text)


@pytest.mark.parametrize(
    "where", ["a pipe that nobody reads", "a full disk", "a file that is closed"]
)
def test_unwritable_output_does_not_end_the_run(where: str, monkeypatch: pytest.MonkeyPatch):
    file = open(os.devnull if "closed" in where else "/dev/full", "w")
    if "pipe" in where:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, file.fileno())
        os.close(writer)
    if "closed" in where:
        file.close()
    monkeypatch.setattr(sys, "stderr", file)
    assert engine(ProgressBar(), steps=20).fit(Net, fg.DataSource(BATCHES)).state.step == 20
    with suppress(OSError):
        file.close()


@pytest.mark.full
def test_each_executable_is_reported(capsys: pytest.CaptureFixture[str]):
    batches = [np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)]
    engine(ProgressBar(times=False), steps=4).fit(Net, fg.DataSource(batches))
    assert capsys.readouterr().err.count("compiled step") == 2


def test_summary_and_times_can_be_left_out(capsys: pytest.CaptureFixture[str]):
    engine(ProgressBar(summary=False, times=False), steps=4).fit(Net, fg.DataSource(BATCHES))
    err = capsys.readouterr().err
    assert (
        "parameters" not in err
        and "compiled" not in err
        and "total" not in err
        and "step 4/4" in err
    )


@dataclass(frozen=True, eq=False)
class Watching:
    """Notes what the line says while a batch is made, an evaluation runs and a checkpoint is
    saved."""

    progress: ProgressBar
    observed: list[str] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)

    def note(self) -> None:
        if self.progress._displays:
            line = self.progress._displays[0].build_line()
            self.observed.append(line.activity)
            self.ends.append(line.end)

    def __iter__(self) -> Iterator[Any]:
        for batch in BATCHES[:2]:
            self.note()
            yield batch

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("test", fg.DataSource(self, prefetch=0))]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("evaluate", fg.At(10), self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate("test")

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        self.note()


@pytest.mark.full
def test_line_names_the_current_activity():
    progress = ProgressBar()
    watching = Watching(progress)
    engine(progress, watching, steps=20).fit(Net, fg.DataSource(BATCHES))
    assert watching.observed == ["evaluating test"] * 2 + ["saving"]
    assert "test/loss" in [
        *engine(progress, watching, steps=20).fit(Net, fg.DataSource(BATCHES)).history
    ]


def test_activity_may_end_while_the_line_is_drawn():
    class Fleeting(list[str]):
        def __getitem__(self, place: Any) -> Any:
            value = super().__getitem__(place)
            self.clear()
            return value

    assert describe_activity(Fleeting(["evaluate.test"])) == "evaluating test"


@pytest.mark.parametrize(
    "names, expected",
    [
        ([], ""),
        (["wait"], ""),
        (["start"], "starting"),
        (["start", "check"], "starting"),
        (["start", "compile"], "compiling"),
        (["progress.on_fit_start"], ""),
        (["report.on_fit_end"], "plugin report"),
        (["report.on_fit_end", "wait"], "plugin report"),
        (["lambda.action 1"], "plugin lambda"),
        (["lambda.half.way"], "plugin lambda"),
        (["test.evaluate", "evaluate.test", "wait"], "evaluating test"),
        (["best.act", "saver.save_checkpoint"], "saving"),
    ],
)
def test_activities_have_the_names_that_users_know(names: list[str], expected: str):
    assert describe_activity(names) == expected


@pytest.mark.full
def test_end_of_a_run_in_epochs_is_the_current_estimate():
    progress = ProgressBar()
    watching = Watching(progress)
    sizes = iter([10, 12])

    class Growing:
        def __iter__(self) -> Iterator[Any]:
            return iter(BATCHES + BATCHES[: next(sizes, 12) - 10])

    engine(progress, watching, epochs=2).fit(Net, fg.DataSource(Growing(), prefetch=0))
    assert watching.ends == [20, 20, 22]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_the_line(capsys: pytest.CaptureFixture[str], error: type[BaseException]):
    def batches() -> Iterator[Any]:
        yield from BATCHES
        raise error("no more")

    with pytest.raises(error):
        engine(ProgressBar(), steps=20).fit(Net, fg.DataSource(batches(), prefetch=0))
    assert f"ended by {error.__name__}" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name == "fulgurite progress"]


@pytest.mark.full
def test_the_line_of_a_step_that_was_not_finite_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = [*BATCHES[:3], np.full_like(BATCHES[0], np.nan), *BATCHES]
    with pytest.raises(NonFiniteError):
        engine(ProgressBar(), steps=9, log_every=3).fit(Net, batches)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "ended by" in line]
    assert line.startswith("step 4/9  ended by NonFiniteError") and "loss" not in line


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from test_progress import BATCHES, Net, engine, fg, ProgressBar

def batches():
    for number in range(10**9):
        if number == 15:
            print({said!r}, end="", flush=True)
            print()
            {act}
        yield BATCHES[0]

result = engine(ProgressBar(refresh=50), steps=1_000).fit(Net, fg.DataSource(batches(), prefetch=0))
print("stopped", result.stop_reason)
"""


SAID = "said [red] by :smile: [/program], on more than one line of a terminal"


@pytest.mark.full
@pytest.mark.parametrize(
    "act",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        pytest.param("raise ValueError('broken')", marks=pytest.mark.slow),
        pytest.param("input()", marks=pytest.mark.slow),
    ],
)
def test_terminal_is_restored(act: str):
    """In a terminal of 40 columns, of 30 once there was an input: the cursor is shown in the end,
    no line is longer than the terminal, and what the program prints is there as it is."""
    mine, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    program = [
        sys.executable,
        "-c",
        PROGRAM.format(folder=os.path.dirname(__file__), said=SAID, act=act),
    ]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(program, **streams, env=environment | {"TERM": "xterm"})  # type: ignore[call-overload]
    written, narrow = b"", False
    os.close(theirs)
    while chunk := _read(mine):
        written += chunk
        if act == "input()" and not narrow and SAID.encode() in written:
            narrow = True
            termios.tcsetwinsize(mine, (24, 30))
            os.write(mine, b"\n")
    process.wait(60)
    text = written.decode()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert SAID in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")]
    assert 30 < len(lines[0]) <= 40 and all(len(line) <= 40 for line in lines)
    assert not narrow or len(lines[-1]) <= 30
    expected = {"os": "stopped: SIGINT", "raise": "ended by ValueError", "input": "done"}[
        re.split(r"\W", act)[0]
    ]
    assert lines[-1].rstrip().endswith(expected)


@pytest.mark.full
def test_output_redirected_to_a_file_stays_there(tmp_path: Path):
    mine, theirs = pty.openpty()
    program = PROGRAM.format(folder=os.path.dirname(__file__), said=SAID, act="pass").replace(
        "1_000", "30"
    )
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=theirs)
    os.close(theirs)
    written = b""
    while chunk := _read(mine):
        written += chunk
    process.wait(60)
    assert (tmp_path / "output").read_text().splitlines() == [SAID, "stopped None"]
    assert b"step 30" in written and b"said" not in written


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


def test_timing_table_lists_each_part():
    accounts = fg.Timings()
    for name, seconds in (
        ("start", 8.0),
        ("data", 1.0),
        ("dispatch", 2.0),
        ("wait", 3.0),
        ("evaluate.test", 4.0),
        ("saver.save_checkpoint", 5.0),
    ):
        accounts.add(name, seconds)
    accounts.add("wandb.log_record", 6.0)
    accounts.add("wandb.on_fit_end", 1.0)
    accounts.background_seconds["compile"] = 9.0
    text = render_text(timing_table(accounts))
    for part, seconds in (
        ("starting", "8.00"),
        ("waiting for data", "1.00"),
        ("steps", "5.00"),
        ("evaluating test", "4.00"),
        ("saving", "5.00"),
        ("plugin wandb", "7.00"),
        ("compiling in background", "9.00"),
    ):
        assert re.search(rf"{part} +{seconds}", text)


def test_deep_model_is_summarized_to_the_available_rows():
    class Deep(Net):
        many: list[eqx.nn.MLP]

        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.many = [eqx.nn.MLP(2, 2, 2, 2, key=key) for _ in range(3)]

    state = engine(steps=1).init_state(Deep, fg.DataSource(BATCHES))
    rows = render_text(model_summary(state, max_rows=30)).splitlines()
    assert any(row.startswith("many[2].layers[1]") for row in rows)
    rows = render_text(model_summary(state, max_rows=4)).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["first", "second", "many"] and rows[3].split()[
        1
    ] == "54"


@pytest.mark.full
def test_summary_shows_optimizer_bytes_and_frozen_parameters(
    capsys: pytest.CaptureFixture[str],
):
    class Inner(eqx.Module):
        first: eqx.nn.Linear

    class Outer(Net):
        encoder: Inner  # whose path `encoder.first.weight` ends like `first.weight`

        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.encoder = Inner(eqx.nn.Linear(10, 10, key=key))

        def configure_optimizers(self) -> Any:
            return {
                "default": fg.OptimizerSpec(
                    optax.adam(1e-3), fg.exclude("second", "encoder.first.bias")
                )
            }

    engine(ProgressBar(), steps=1).fit(Outer, fg.DataSource(BATCHES))
    rows = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert [row for row in rows if re.match(r"(first|second|encoder|Outer)", row)] == [
        "first 16 64 B 128 B float32",
        "second 10 40 B 0 B float32 yes",
        "encoder.first 110 440 B 800 B float32 partly",
        "Outer: 136 parameters, 544 B; optimizer 932 B; frozen 20",
    ]


def test_parameter_table_lists_all_arrays():
    rows = [
        row.rstrip()
        for row in render_text(parameter_table(Net(key=jax.random.key(0)))).splitlines()
    ]
    assert rows[1:3] == [
        "first.weight   4×3    float32  -                 12   48 B",
        "first.bias     4      float32  -                  4   16 B",
    ]
    assert len(rows) == 5


@pytest.mark.parametrize("refresh", [0, -1, 61, "often"])
def test_invalid_refresh_is_an_error(refresh: Any):
    with pytest.raises(ConfigurationError, match="refresh"):
        ProgressBar(refresh=refresh)


def test_a_string_of_names_to_hide_is_an_error():
    with pytest.raises(ConfigurationError, match=r"hide=\('loss',\)"):
        ProgressBar(hide="loss")  # type: ignore[arg-type]


def test_messages_are_printed_above_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Those from before the line began, too; what Python warns of is not printed twice."""

    class Telling:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            run.notify("telling", "it begins [now]")

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("tell", fg.At(2), self.tell)]

        def tell(self, run: fg.Run) -> None:
            run.notify("telling", "half of it")
            run.log_text("telling", {"message": "warned of", "failed": "save"}, stream="telemetry")

    result = engine(Telling(), ProgressBar(summary=False, times=False), steps=4).fit(Net, BATCHES)
    assert result.messages == ["it begins [now]", "half of it"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("note")] == [
        "note: it begins [now]",
        "note: half of it",
    ]
