"""Where the time of a run went, over attempts that were killed."""

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_monitor import AttemptTimes, Goodput, GoodputReport, read_goodput
from fulgurite_monitor.ledger import AttemptFile, add_up
from monitored import Line, Records, make_rows

PROGRAM = Path(__file__).with_name("interrupted.py")
DELAY = 0.05
"""By which a sleep may be late, in seconds."""
NOTHING = dict.fromkeys(
    ("steps", "start", "compile", "data", "evaluation", "save", "restore", "other"), 0.0
)


def make_attempt(attempt: int, steps: tuple[int, int], times: tuple[float, float]) -> AttemptTimes:
    """Return an attempt in which each step took 0.1 s, and everything else was its start.

    Args:
        attempt: its number.
        steps: the first and the last.
        times: when it began and was last alive.
    """
    trained = 0.1 * (steps[1] - steps[0])
    seconds = NOTHING | {"steps": trained, "start": times[1] - times[0] - trained}
    return AttemptTimes(attempt, False, *steps, *times, seconds)


def test_steps_that_are_lost_and_time_between_attempts_are_no_goodput() -> None:
    report = add_up([make_attempt(1, (0, 15), (0, 5)), make_attempt(2, (10, 20), (7, 10))])
    assert report.wall == 10
    assert report.seconds["steps"] == pytest.approx(2.0)
    assert report.seconds["lost"] == pytest.approx(0.5)
    assert report.seconds["down"] == 2
    assert report.goodput == pytest.approx(2.0 / 10)


def test_attempt_that_goes_back_before_others_loses_steps_of_each_of_them() -> None:
    attempts = [
        make_attempt(1, (0, 15), (0, 5)),
        make_attempt(2, (10, 30), (5, 10)),
        make_attempt(3, (5, 6), (10, 15)),  # such as resume=5
    ]
    report = add_up(attempts)
    assert report.seconds["lost"] == pytest.approx(0.1 * (10 + 20))
    assert report.seconds["steps"] == pytest.approx(0.1 * (5 + 1))
    fresh = replace(make_attempt(4, (0, 4), (20, 21)), is_fresh=True)
    report = add_up([*attempts, fresh])
    assert report.wall == 1 and report.attempts == (fresh,)


@pytest.mark.full
def test_fit_notes_its_times_and_logs_them_as_telemetry(tmp_path: Path) -> None:
    records = Records("goodput")
    plugins = [Goodput(interval=60), records]
    settings = {"run_dir": tmp_path, "plugins": plugins, "autoload": False}
    engine = fg.Engine(steps=6, log_every=2, **settings)
    result = engine.fit(Line, make_rows(64))
    # Step 4 is logged as well where it comes more than a second after step 2.
    assert [record.step for record in records.records if record.step != 4] == [2, 6]
    last = records.values[-1]
    assert {record.stream for record in records.records} == {"telemetry"}
    report = read_goodput(tmp_path)
    (attempt,) = report.attempts
    assert (attempt.attempt, attempt.start_step, attempt.step) == (1, 0, 6)
    assert sum(attempt.seconds.values()) == pytest.approx(attempt.last_alive - attempt.began)
    assert attempt.seconds["compile"] == pytest.approx(result.timings.seconds["compile"])
    assert last["wall_seconds"] <= report.wall
    assert last["goodput"] == pytest.approx(last["steps_seconds"] / last["wall_seconds"])
    # The first fit of a process began with it, the second one when it was called.
    engine.fit(data=make_rows(64), state=result.state)
    second = read_goodput(tmp_path).attempts[1]
    assert second.start_step == 6 and second.step == 12
    assert second.began >= attempt.last_alive
    # Whoever reads the run without these notes finds the same beginnings.
    manifests = [json.loads((tmp_path / "attempts" / name).read_text()) for name in "12"]
    assert [manifest["began"] for manifest in manifests] == [attempt.began, second.began]


def test_run_without_a_directory_knows_its_own_times(tmp_path: Path) -> None:
    records = Records("goodput")
    engine = fg.Engine(steps=2, log_every=2, plugins=[Goodput(), records], autoload=False)
    engine.fit(Line, make_rows(64))
    assert 0 < records.values[0]["goodput"] < 1
    with pytest.raises(ConfigurationError, match="holds no times"):
        read_goodput(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"attempt": 1}', "[" * 100_000],
)
def test_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "goodput").mkdir()
    (tmp_path / "goodput" / "1").write_text(content)
    with pytest.raises(ConfigurationError, match="goodput/1 does not say"):
        read_goodput(tmp_path)


def test_only_the_damaged_one_of_the_earlier_attempts_is_left_out(tmp_path: Path) -> None:
    """Of four attempts, the second was killed before it wrote and the third has lost its bytes."""
    engine = fg.Engine(steps=2, log_every=2, run_dir=tmp_path, plugins=[Goodput()], autoload=False)
    engine.fit(Line, make_rows(64), resume="never")
    first = (tmp_path / "goodput" / "1").read_bytes()
    for number, content in {1: first, 2: b"", 3: b"{}"}.items():
        (tmp_path / "attempts" / str(number)).write_bytes((tmp_path / "attempts/1").read_bytes())
        (tmp_path / "goodput" / str(number)).write_bytes(content)
    records = Records("goodput")
    engine = fg.Engine(
        steps=4, log_every=2, run_dir=tmp_path, plugins=[Goodput(), records], autoload=False
    )
    with pytest.warns(UserWarning, match="the time of attempt 3 is left out"):
        result = engine.fit(Line, make_rows(64))
    assert "goodput/3 does not say what an attempt" in result.failures["goodput"]
    (tmp_path / "goodput" / "3").unlink()
    report = read_goodput(tmp_path)
    assert [attempt.attempt for attempt in report.attempts] == [1, 4]
    # As the run has logged it, from the begin of the first one.
    assert 0 < records.values[-1]["wall_seconds"] <= report.wall


def test_a_file_that_can_no_longer_be_written_is_told_at_the_end(tmp_path: Path) -> None:
    engine = fg.Engine(
        steps=2, log_every=None, run_dir=tmp_path, plugins=[Goodput()], autoload=False
    )
    (tmp_path / "goodput").touch()  # where its folder should be
    with pytest.warns(UserWarning, match="the times of the run cannot be noted"):
        result = engine.fit(Line, make_rows(64))
    assert "goodput" in result.failures


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("last_alive", "now"),
        ("is_fresh", 1),
        ("seconds", {}),
        ("began", float("nan")),
    ],
)
def test_edited_number_is_an_error(tmp_path: Path, name: str, value: Any) -> None:
    with closing(AttemptFile(tmp_path, 1)) as file:
        file.write(make_attempt(1, (0, 5), (0, 5)))
    assert read_goodput(tmp_path).wall == 5
    path = tmp_path / "goodput" / "1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ConfigurationError, match="goodput/1"):
        read_goodput(tmp_path)


def run_attempts(
    run_dir: Path, kills: list[int], down: float, durations: list[float], num_steps: int
) -> tuple[GoodputReport, float, float]:
    """Run the program until it ends, and return its report, the wall time, and the time between
    attempts.

    Args:
        run_dir: the run directory.
        kills: the step after which each attempt but the last one kills itself.
        down: seconds to wait before the next attempt.
        durations: of a step, a save, an evaluation, a batch and a restore.
        num_steps: of the run.
    """
    began = ended = time.time()
    time_down = 0.0
    for kill_at in (*kills, 0):
        arguments = [str(argument) for argument in (run_dir, kill_at, *durations, num_steps)]
        process = subprocess.Popen([sys.executable, PROGRAM, *arguments])
        time_down += time.time() - ended
        assert process.wait() == (-signal.SIGKILL if kill_at else 0)
        ended = time.time()
        time.sleep(down if kill_at else 0)
    return read_goodput(run_dir), ended - began, time_down


def read_measured(run_dir: Path) -> dict[str, float]:
    """Return the seconds that the program measured itself, by what took them."""
    seconds: dict[str, float] = defaultdict(float)
    for line in (run_dir / "measured").read_text().splitlines():
        name, value = line.split()
        seconds[name] += float(value)
    return seconds


def check_bucket(report: GoodputReport, bucket: str, seconds: float, num_parts: int) -> None:
    """Check that a bucket is within a tenth of what the program did. On a busy machine each of its
    parts takes longer.

    Args:
        report: of the run.
        bucket: its name.
        seconds: that its parts took at least.
        num_parts: how many sleeps it is made of.
    """
    assert 0.9 * seconds <= report.seconds[bucket], bucket
    assert report.seconds[bucket] <= 1.1 * seconds + DELAY * num_parts, bucket


@pytest.mark.slow
def test_one_kill_loses_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    report, wall, down = run_attempts(tmp_path, [15], 2.0, [0.1, 0, 0, 0, 0], 20)
    check_bucket(report, "lost", 0.5, 5)
    check_bucket(report, "steps", 2.0, 20)
    check_bucket(report, "down", down, 1)
    assert report.wall == pytest.approx(wall, rel=0.1)
    assert report.goodput == report.seconds["steps"] / report.wall


@pytest.mark.full
def test_every_bucket_of_a_run_with_kills_is_what_the_run_did(tmp_path: Path) -> None:
    step, save, evaluation, batch, restore = 0.1, 1.0, 1.5, 0.05, 2.0
    durations = [step, save, evaluation, batch, restore]
    report, wall, down = run_attempts(tmp_path, [15, 16], 1.0, durations, 20)
    assert len(report.attempts) == 3
    taken = read_measured(tmp_path)
    # The last save of the run finds that all is saved already.
    assert taken["save"] >= 2 * save and taken["restore"] >= 2 * restore
    # 15, 6 and 10 steps were taken; the run has kept 20 of these 31.
    check_bucket(report, "steps", 20 * step, 20)
    check_bucket(report, "lost", 11 * step, 11)
    check_bucket(report, "data", 31 * batch, 31)
    check_bucket(report, "evaluation", evaluation, 1)
    check_bucket(report, "save", taken["save"], 2)
    # The step is compiled while the arrays are read, and that time is counted as such.
    compiled = sum(attempt.seconds["compile"] for attempt in report.attempts[1:])
    check_bucket(report, "restore", taken["restore"] - compiled, 2)
    check_bucket(report, "down", down, 2)
    assert report.wall == pytest.approx(wall, rel=0.1)
    assert report.goodput == report.seconds["steps"] / report.wall
    assert report.seconds["start"] > 0 and report.seconds["compile"] > 0
