"""The progress line, the summary and the times: what they say, where they go, and that nothing is left behind."""

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_progress import Progress, summary, times
from fulgurite_progress.line import Line
from hypothesis import given, strategies as st
from rich.console import Console


class Net(fg.Module):
    """Two layers of 3·4 + 4 and 4·2 + 2 numbers."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        one, two = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(3, 4, key=one), eqx.nn.Linear(4, 2, key=two)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((jax.vmap(lambda x: self.second(self.first(x)))(batch) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


BATCHES = [np.ones((2, 3), np.float32)] * 10


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def text_of(renderable: Any) -> str:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


LINE = Line(1200, 2000, 812.3, {"batch_loss": 0.5, "loss": 0.25, "test/error": 0.9876}, "compiling")


@pytest.mark.parametrize(
    "width, expected",
    [
        (
            103,
            "step 1,200/2,000  ━━━━━━━━━━━━╌╌╌╌╌╌╌╌  812 steps/s  0:01 left  loss 0.25  test/error 0.9876  compiling",
        ),
        (85, "step 1,200/2,000  ━━━━━━━━━━━━╌╌╌╌╌╌╌╌  812 steps/s  0:01 left  loss 0.25  compiling"),
        (40, "step 1,200/2,000  0:01 left  compiling"),
        (16, "step 1,200/2,000"),
    ],
)
def test_a_line_holds_what_fits_and_the_most_telling_first(width: int, expected: str):
    assert LINE.text(width).plain == expected


@given(
    st.integers(1, 200),
    st.integers(0, 10**9),
    st.none() | st.integers(1, 10**9),
    st.none() | st.floats(1e-4, 1e6),
    st.dictionaries(st.text("abc/", min_size=1, max_size=30), st.floats()),
)
def test_a_line_is_never_wider_than_the_terminal(width: int, step: int, end: Any, rate: Any, metrics: Any):
    assert LINE.text(width).cell_len <= width
    assert Line(step, end, rate, metrics, "evaluating test").text(width).cell_len <= width


@pytest.mark.parametrize(
    "rate, left, shown",
    [(0.5, 7200, "2 s/step"), (4.97, 725, "4.97 steps/s"), (0.1, 36000, "10 s/step")],
)
def test_rates_and_times(rate: float, left: int, shown: str):
    text = Line(0, 3600, rate).text(200).plain
    hours, minutes, seconds = round(3600 / rate) // 3600, round(3600 / rate) // 60 % 60, round(3600 / rate) % 60
    clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    assert shown in text and f"{clock} left" in text


def test_a_run_is_shown_on_standard_error_twice_in_one_process(capsys: pytest.CaptureFixture[str]):
    trained = engine(Progress(), steps=20)
    for _ in range(2):
        trained.fit(Net, fg.Data(BATCHES))
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(r"first +16 +64 B +128 B +float32", err) and re.search(r"second +10 +40 B +80 B", err)
        assert "Net: 26 parameters, 104 B; optimizer 212 B" in err  # and adam's count
        assert re.search(r"step 20/20 .*loss .*done", err)
        assert re.search(r"total +\d", err)
        assert not [one for one in threading.enumerate() if one.name == "fulgurite progress"]


def test_each_executable_is_reported(capsys: pytest.CaptureFixture[str]):
    batches = [np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)]
    engine(Progress(times=False), steps=4).fit(Net, fg.Data(batches))
    assert capsys.readouterr().err.count("compiled step") == 2


def test_summary_and_times_can_be_left_out(capsys: pytest.CaptureFixture[str]):
    engine(Progress(summary=False, times=False), steps=4).fit(Net, fg.Data(BATCHES))
    err = capsys.readouterr().err
    assert "parameters" not in err and "compiled" not in err and "total" not in err and "step 4/4" in err


@dataclass(frozen=True, eq=False)
class Watching:
    """Notes what the line says while a batch is made, an evaluation runs and a checkpoint is saved."""

    progress: Progress
    seen: list[str] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)

    def note(self) -> None:
        if self.progress._shown:
            line = self.progress._shown[0].line()
            self.seen.append(line.doing)
            self.ends.append(line.end)

    def __iter__(self) -> Iterator[Any]:
        for batch in BATCHES[:2]:
            self.note()
            yield batch

    @fg.hookimpl
    def evaluators(self) -> list[fg.EvaluatorSpec]:
        return [fg.EvaluatorSpec("test", fg.Data(self, prefetch=0))]

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("evaluate", fg.At(10), self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate("test")

    @fg.hookimpl
    def save(self, run: fg.Run) -> None:
        self.note()


def test_the_line_says_what_is_going_on():
    progress = Progress()
    watching = Watching(progress)
    engine(progress, watching, steps=20).fit(Net, fg.Data(BATCHES))
    assert watching.seen == ["evaluating test"] * 2 + ["saving"]
    assert "test/loss" in [*engine(progress, watching, steps=20).fit(Net, fg.Data(BATCHES)).history]


def test_the_end_of_a_run_in_epochs_is_that_known_so_far():
    progress = Progress()
    watching = Watching(progress)
    sizes = iter([10, 12])

    class Growing:
        def __iter__(self) -> Iterator[Any]:
            return iter(BATCHES + BATCHES[: next(sizes, 12) - 10])

    engine(progress, watching, epochs=2).fit(Net, fg.Data(Growing(), prefetch=0))
    assert watching.ends == [20, 20, 22]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_the_line(capsys: pytest.CaptureFixture[str], error: type[BaseException]):
    def batches() -> Iterator[Any]:
        yield from BATCHES
        raise error("no more")

    with pytest.raises(error):
        engine(Progress(), steps=20).fit(Net, fg.Data(batches(), prefetch=0))
    assert f"ended by {error.__name__}" in capsys.readouterr().err
    assert not [one for one in threading.enumerate() if one.name == "fulgurite progress"]


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from test_progress import BATCHES, Net, engine, fg, Progress

def batches():
    for number in range(10**9):
        if number == 15:
            print("said by the program", flush=True)
            {act}
        yield BATCHES[0]

result = engine(Progress(refresh=50), steps=1_000).fit(Net, fg.Data(batches(), prefetch=0))
print("stopped", result.stopped)
"""


@pytest.mark.parametrize("act", ["os.kill(os.getpid(), signal.SIGINT)", "raise ValueError('broken')", "pass"])
def test_a_terminal_is_left_as_it_was(act: str):
    """In a terminal of 40 columns: the cursor is shown in the end, and no line is longer than the terminal."""
    mine, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "40", "LINES": "24", "TERM": "xterm"}
    program = PROGRAM.format(folder=os.path.dirname(__file__), act=act)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while chunk := _read(mine):
        written += chunk
    process.wait(60)
    text = written.decode()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert "said by the program" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")]
    assert lines and all(len(line) <= 40 for line in lines)
    expected = {"os": "stopped: SIGINT", "raise": "ended by ValueError", "pass": "done"}[re.split(r"\W", act)[0]]
    assert lines[-1].rstrip().endswith(expected)


def test_what_is_printed_into_a_file_stays_there_though_the_line_is_in_a_terminal(tmp_path: Path):
    mine, theirs = pty.openpty()
    program = PROGRAM.format(folder=os.path.dirname(__file__), act="pass").replace("1_000", "30")
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=theirs)
    os.close(theirs)
    written = b""
    while chunk := _read(mine):
        written += chunk
    process.wait(60)
    assert (tmp_path / "output").read_text().splitlines() == ["said by the program", "stopped None"]
    assert b"step 30" in written and b"said" not in written


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


def test_times_by_part():
    accounts = fg.Accounts()
    for name, seconds in (("data", 1.0), ("dispatch", 2.0), ("wait", 3.0), ("evaluate.test", 4.0), ("saver.save", 5.0)):
        accounts.add(name, seconds)
    accounts.add("wandb.log_scalars", 6.0)
    accounts.add("wandb.on_fit_end", 1.0)
    text = text_of(times(accounts))
    for part, seconds in (
        ("waiting for data", "1.00"),
        ("steps", "5.00"),
        ("evaluating test", "4.00"),
        ("saving", "5.00"),
        ("plugin wandb", "7.00"),
    ):
        assert re.search(rf"{part} +{seconds}", text)


def test_a_deep_model_is_summed_up_to_the_rows_there_are():
    class Deep(Net):
        many: list[eqx.nn.MLP]

        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.many = [eqx.nn.MLP(2, 2, 2, 2, key=key) for _ in range(3)]

    state = engine(steps=1).init(Deep, fg.Data(BATCHES))
    rows = text_of(summary(state, rows=30)).splitlines()
    assert any(row.startswith("many[2].layers[1]") for row in rows)
    rows = text_of(summary(state, rows=4)).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["first", "second", "many"] and rows[3].split()[1] == "54"


@pytest.mark.parametrize("refresh", [0, -1, 61, "often"])
def test_a_refresh_that_cannot_be_is_an_error(refresh: Any):
    with pytest.raises(ConfigurationError, match="refresh"):
        Progress(refresh=refresh)
