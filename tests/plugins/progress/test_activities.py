"""What is shown of evaluations, saves and the parts of a start, in a terminal and in a pipe."""

import re
import threading
from collections.abc import Iterator
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite.plugins import Activity
from fulgurite_checkpoint import Checkpointer, writing
from fulgurite_evaluators import Evaluator
from fulgurite_progress import ProgressBar, display
from fulgurite_progress.line import Line
from fulgurite_progress.plain import PlainLines
from fulgurite_progress.times import find_activity
from fulgurite_progress.work import WorkLine
from rich.console import Console

BATCHES = [np.ones((2, 3), np.float32)] * 5


class Net(fg.Module):
    """A layer of 3 x 2 numbers and 2 more."""

    layer: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.layer = eqx.nn.Linear(3, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((jax.vmap(self.layer)(batch) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


def make_line(step: int, activity: str = "", *, ended: bool = False) -> Line:
    return Line(step, 100, 2.0, {"loss": step / 4}, activity, ended=ended)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (60, "evaluating test  8 s  20/50 batches  0:12 left  ━━━━╌╌╌╌╌╌╌╌"),
        (52, "evaluating test  8 s  20/50 batches  0:12 left"),
        (20, "evaluating test  8 s"),
    ],
)
def test_a_bar_takes_what_the_line_of_an_evaluation_leaves(width: int, expected: str) -> None:
    activity = Activity("evaluating test", 50, "batches", 0, done=20)
    assert WorkLine(activity, 8.0).text(width).plain == expected


def test_what_is_not_known_of_an_activity_is_left_out() -> None:
    evaluation = Activity("evaluating test", None, "batches", 0, done=3)
    assert WorkLine(evaluation, 2.0).text(80).plain == "evaluating test  2 s  3 batches"
    save = Activity("saving step 40", 2_000_000, "bytes", 0, done=500_000)
    assert (
        WorkLine(save, 2.0).text(50).plain == "saving step 40  2 s  500 kB/2 MB  ━━━━╌╌╌╌╌╌╌╌╌╌╌╌"
    )


def test_a_name_cannot_command_the_terminal() -> None:
    activity = Activity("evaluating \x1b[2Jtest", 50, "batches", 0)
    assert "\x1b" not in WorkLine(activity, 1.0).text(80).plain


def choose(lines: PlainLines, line: Line, now: float, **details: Any) -> str | None:
    known = {"activity": line.activity, "lasting": 0.0, "count": "", "has_news": False}
    chosen = lines.choose(line, now, **(known | details))
    return None if chosen is None else chosen.text().plain


def test_a_pipe_gets_a_line_for_each_log_step_and_at_most_one_a_second() -> None:
    lines = PlainLines(0.0)
    shown = [choose(lines, make_line(step), step / 4, has_news=True) for step in range(1, 13)]
    steps = [int(re.findall(r"step (\d+)", text)[0]) for text in shown if text is not None]
    assert steps == [1, 5, 9]
    assert shown[0] == "step 1/100  loss 0.25  0:50 left  2 steps/s"
    # After an hour, a line for each hundredth of the time: after more than 36 seconds.
    later = [choose(lines, make_line(step), 3600 + step, has_news=True) for step in range(13, 90)]
    assert [step for step, text in enumerate(later) if text is not None] == [0, 37, 74]


def test_a_pipe_gets_a_line_at_growing_intervals_if_nothing_is_logged() -> None:
    lines = PlainLines(0.0)
    shown = [second for second in range(1, 70) if choose(lines, make_line(second), second)]
    assert shown == [2, 6, 14, 30, 62]


def test_an_activity_that_lasts_has_one_line_in_a_pipe_and_no_numbers_twice() -> None:
    lines = PlainLines(0.0)
    line = make_line(10, "compiling")
    seconds = np.arange(0.0, 60.0, 0.5)
    shown = [choose(lines, line, now, lasting=now, has_news=now == 0) for now in seconds]
    assert [text for text in shown if text is not None] == [
        "step 10/100  loss 2.5  0:45 left  2 steps/s",
        "step 10/100  compiling",
    ]
    last = make_line(100, "saving")
    assert choose(lines, last, 70.0, lasting=3.0, has_news=True) == "step 100/100  saving"
    ended = make_line(100, "done", ended=True)
    assert choose(lines, ended, 70.1) == "step 100/100  loss 25  2 steps/s  done"


def test_a_long_evaluation_tells_a_pipe_how_far_it_is_at_growing_intervals() -> None:
    lines = PlainLines(0.0)
    line = make_line(10, "evaluating test")
    shown = [
        choose(lines, line, float(now), lasting=float(now), count=f"{now}/90 batches")
        for now in range(40)
    ]
    counts = [re.findall(r"(\d+)/90", text)[0] for text in shown if text is not None]
    assert counts == ["1", "3", "7", "15", "31"]


def test_compiling_within_an_evaluation_is_shown_as_that() -> None:
    timings = fg.Timings()
    assert find_activity(timings) == ("", None)
    with timings.time("evaluate.test"), timings.describe("evaluating test", 4, "batches") as part:
        assert find_activity(timings) == ("evaluating test", part)
        with timings.time("compile"):
            assert find_activity(timings) == ("compiling", None)
            with timings.describe("tracing"):
                assert find_activity(timings)[0] == "tracing"
    assert find_activity(timings) == ("", None)


class Watching:
    """Notes what a terminal would show while batches are read and checkpoints are written."""

    def __init__(self) -> None:
        self.progress = ProgressBar()
        self.shown: list[str] = []

    def note(self) -> None:
        for shown in self.progress._displays:
            console = Console(width=100, file=StringIO(), record=True)
            console.print(shown.build_view())
            self.shown.append(console.export_text())

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Iterator[Any]:
        for batch in BATCHES:
            self.note()
            yield batch


def test_an_evaluation_has_a_bar_below_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(display, "monotonic", lambda: float(next(ticks)))
    watching = Watching()
    evaluator = Evaluator("test", fg.DataSource(watching, prefetch=0), every=5, num_batches=4)
    plugins = [watching.progress, evaluator]
    fg.Engine(steps=5, plugins=plugins, autoload=False).fit(Net, BATCHES)
    views = [view.splitlines() for view in watching.shown if "evaluating test" in view]
    last_line, last_bar = views[-1]
    assert last_line.startswith("step 5/5  ") and "evaluating" not in last_line
    assert re.fullmatch(
        r"evaluating test  \d+ s  2/4 batches  0:\d\d left  ━{20}╌{20}", last_bar.rstrip()
    )


@pytest.mark.full
def test_a_save_that_training_waits_for_has_a_bar_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(display, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(writing, "MEASURE_INTERVAL", 0.01)
    watching = Watching()
    write_files = writing.PendingCheckpoint._write_files
    is_shown = threading.Event()

    def write_slowly(self: writing.PendingCheckpoint) -> list[Any]:
        (self.path / "other").write_bytes(bytes(30))
        assert is_shown.wait(60)
        (self.path / "other").unlink()
        return write_files(self)

    def look() -> None:
        while not is_shown.is_set():
            watching.note()
            if any("saving step 5 " in view and "B/" in view for view in watching.shown):
                is_shown.set()

    monkeypatch.setattr(writing.PendingCheckpoint, "_write_files", write_slowly)
    looking = threading.Thread(target=look)
    looking.start()
    plugins = [watching.progress, Checkpointer(every=5)]
    engine = fg.Engine(steps=5, run_dir=tmp_path / "run", plugins=plugins, autoload=False)
    result = engine.fit(Net, BATCHES)
    looking.join()
    assert not result.failures
    assert re.search(r"saving step 5  \d+ s  \d+ B/\d+ B  [━╌]{5,}", "".join(watching.shown))


@pytest.mark.full
def test_a_resumed_run_says_which_step_it_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    describe = fg.Timings.describe

    def note(self: fg.Timings, text: str, *rest: Any) -> Any:
        texts.append(text)
        return describe(self, text, *rest)

    def train(steps: int) -> None:
        plugins = [Checkpointer()]
        engine = fg.Engine(steps=steps, run_dir=tmp_path / "run", plugins=plugins, autoload=False)
        engine.fit(Net, BATCHES, resume="auto")

    train(5)
    monkeypatch.setattr(fg.Timings, "describe", note)
    train(7)
    assert "restoring step 5" in texts
    assert texts.index("reading the first batch") < texts.index("restoring step 5")
