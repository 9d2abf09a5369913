"""The files of whole runs: one that is killed and started again leaves those of one that was
not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, SaveError
from fulgurite_logging import BackgroundWriter, CSVLogger, JSONLLogger, LogBackend
from fulgurite_runs.json_codec import loads
from logged import Act, Growing, Keeper, Line, data, newest

pytestmark = pytest.mark.full

FILES = ("records.jsonl", "records.csv")
STEPS = 24


def engine(run: Path | None, *plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(
        plugins=plugins, autoload=False, run_dir=run, **{"steps": STEPS, "log_every": 5, **settings}
    )


def loggers() -> list[Any]:
    return [JSONLLogger(), CSVLogger(), Growing()]


def lines(path: Path) -> list[Any]:
    return [loads(line) for line in path.read_bytes().splitlines()]


def files(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The exact files of a run that nobody interrupts."""
    run = tmp_path_factory.mktemp("whole")
    result = engine(run, *loggers()).fit(Line, data())
    assert not result.failures and result.history.steps("train/loss").tolist() == [
        5,
        10,
        15,
        20,
        24,
    ]
    return files(run)


def test_the_file_has_the_history(tmp_path: Path) -> None:
    result = engine(tmp_path, "jsonl", "csv", steps=7, log_every=3).fit(Line, data())
    written = [
        (record["step"], record["source"], record["values"])
        for record in lines(tmp_path / "records.jsonl")
    ]
    assert written == [
        (record.step, record.source, record.values) for record in result.history.records
    ]
    header, *rows = (tmp_path / "records.csv").read_text().splitlines()
    column = header.split(",").index("train/loss")
    assert [float(row.split(",")[column]) for row in rows] == result.history["train/loss"].tolist()
    rates = [
        record
        for record in lines(tmp_path / "telemetry.jsonl")
        if "steps_per_second" in record["values"]
    ]
    assert [(record["step"], record["attempt"]) for record in rates] == [(6, 1), (7, 1)]


def test_exact_records_hold_nothing_of_clock_and_process(whole: dict[str, bytes]) -> None:
    for line in whole["records.jsonl"].splitlines():
        assert set(json.loads(line)) == {"kind", "source", "step", "values"}


def test_file_loggers_need_a_run_directory() -> None:
    for logger in ("jsonl", "csv"):
        with pytest.raises(
            ConfigurationError, match=rf"{logger} writes into the run's directory.*--run"
        ):
            engine(None, logger).fit(Line, data())


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    engine(tmp_path / "run", *loggers(), fast_dev_run=2).fit(Line, data())
    assert not (tmp_path / "run").exists()


# --- once -----------------------------------------------------------------------------------------


def test_repeatedly_killed_run_leaves_the_same_files(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """By SIGKILL in a step, right after a checkpoint, and with records in the queue and a torn
    line; three times."""
    for number, death in enumerate(["step 7", "kept 12", "queued 19"]):
        process = start(tmp_path, death)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert newest(tmp_path) == [6, 12, 18][number]
        if death == "queued 19":
            for name in FILES:
                with open(tmp_path / name, "ab") as file:
                    file.write(b'{"torn":')
        assert any(files(tmp_path)[name] != whole[name] for name in FILES)
    process = start(tmp_path, "")
    assert process.returncode == 0, process.stderr
    assert files(tmp_path) == whole
    telemetry = lines(tmp_path / "telemetry.jsonl")
    assert {record["attempt"] for record in telemetry} == {1, 2, 3, 4}
    assert {record["step"] for record in telemetry} >= set(range(2, STEPS + 1, 2))


def start(run: Path, death: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, str(run), death]
    return subprocess.run(command, capture_output=True, text=True)


def worker(run: Path, death: str) -> None:
    """Trains and dies: at a step; right after the checkpoint of a step; or at a step with all later
    records queued."""
    how, _, step = death.partition(" ")

    def die(run: fg.Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(Keeper):
        @fg.hookimpl
        def save_checkpoint(self, run: fg.Run) -> None:
            super().save_checkpoint(run)
            if how == "kept" and run.step == int(step):
                die(run)

    plugins: list[Any] = [*loggers(), Dying(6)]
    if how in ("step", "queued"):
        plugins.append(Act(fg.At(int(step)), die))
    if how == "queued":
        gate = threading.Event()
        plugins[0] = Gated(gate, free=20)
    engine(run, *plugins).fit(Line, data(), resume=fg.CheckpointRef(run, optional=True))


@dataclass(eq=False)
class Gated(JSONLLogger):
    """Writes all but the first `free` records only once `gate` is open."""

    gate: threading.Event = field(default_factory=threading.Event)
    free: int = 0

    def __init__(self, gate: threading.Event, free: int = 0) -> None:
        super().__init__()
        self.gate, self.free = gate, free

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        backend = super().open_backend(run, position)
        write, left = backend.write, iter(range(self.free))

        def gated(record: fg.Record) -> None:
            if next(left, None) is None:
                assert self.gate.wait(300)
            write(record)

        backend.write = gated  # type: ignore[method-assign]
        return backend


def test_training_does_not_wait_for_a_slow_disk_and_a_checkpoint_does(tmp_path: Path) -> None:
    """Nothing is written until the last step, by when everything was trained and a position was
    asked for at step 6."""
    gate, futures, observed = threading.Event(), [], []
    logger = Gated(gate)

    def ask(run: fg.Run) -> None:
        futures.append(logger.flush_logger(run.step))

    def look(run: fg.Run) -> None:
        observed.append((run.step, (tmp_path / "records.jsonl").stat().st_size, futures[0].done()))
        gate.set()

    ask_at, look_at = Act(fg.At(6), ask, "ask"), Act(fg.At(STEPS), look, "look")
    engine(tmp_path, logger, Growing(), ask_at, look_at).fit(Line, data())
    assert observed == [(STEPS, 0, False)]
    size = futures[0].result(0)["records.jsonl"]
    assert (
        max(
            json.loads(line)["step"]
            for line in (tmp_path / "records.jsonl").read_bytes()[:size].splitlines()
        )
        == 6
    )


def test_run_killed_before_its_first_checkpoint_is_recorded_once(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    def die(run: fg.Run) -> None:
        raise KeyError("dead")

    with pytest.raises(KeyError):
        engine(tmp_path, *loggers(), Act(fg.At(7), die)).fit(Line, data())
    dead = files(tmp_path)
    engine(tmp_path, *loggers()).fit(Line, data())
    assert files(tmp_path) == whole
    (aside,) = (tmp_path / "superseded").iterdir()
    assert files(aside) == dead


def test_second_fit_continues_the_files_of_the_first(tmp_path: Path) -> None:
    both = engine(tmp_path, *loggers(), steps=4, log_every=2)
    first = both.fit(Line, data())
    before = files(tmp_path)
    both.fit(data=data(), state=first.state)
    after = files(tmp_path)
    assert all(
        after[name].startswith(before[name]) and len(after[name]) > len(before[name])
        for name in ["records.jsonl"]
    )
    assert [
        record["step"]
        for record in lines(tmp_path / "records.jsonl")
        if record["source"] == "train"
    ] == [2, 4, 6, 8]


def test_missing_records_are_an_error_on_resume(tmp_path: Path) -> None:
    engine(tmp_path, JSONLLogger(), Keeper(6), steps=6, log_every=2).fit(Line, data())
    (tmp_path / "records.jsonl").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"records\.jsonl is not the file that the checkpoint knows: it has 0 bytes",
    ):
        engine(tmp_path, JSONLLogger(), Keeper(6)).fit(
            Line, data(), resume=fg.CheckpointRef(tmp_path)
        )


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[list[str]]:
    """A command that runs another one with a file system of 64 KiB at `tmp_path`."""
    script = 'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield prefix


def test_training_continues_on_a_full_disk(tmp_path: Path, small_disk: list[str]) -> None:
    done = subprocess.run(
        [*small_disk, sys.executable, __file__, str(tmp_path), "full"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["failed"]) == {"jsonl"}
    assert (
        "No space left on device" in report["failed"]["jsonl"]
        and ".jsonl" in report["failed"]["jsonl"]
    )
    assert report["step"] == STEPS and report["whole_lines"]
    assert done.stderr.count("logger 'jsonl' failed") == 1
    position = report["positions"]["jsonl"]
    assert (
        "No space left on device" in position["failed"]
        and position["position"]["records.jsonl"] == report["size"]
    )


def full(run: Path) -> None:
    """Fills the disk at step 9, keeps on training, and tells how that went."""
    run = run / "run"

    def fill(active_run: fg.Run) -> None:
        settle(active_run)
        with open(run.parent / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass

    def make_room(active_run: fg.Run) -> None:
        futures = active_run.engine.plugins.hooks.flush_logger.each(
            active_run.step, step=active_run.step
        )
        positions.update({logger.name: future.result(60) for logger, future in futures})
        (run.parent / "filler").unlink()

    def shout(active_run: fg.Run) -> None:
        active_run.log_text("shout", {"text": "x" * 3000})

    positions: dict[str, Any] = {}
    acts = [Act(2, shout, "shout"), Act(fg.At(9), fill, "fill"), Act(fg.At(22), make_room, "room")]
    result = engine(run, JSONLLogger(), *acts).fit(Line, data())
    content = (run / "records.jsonl").read_bytes()
    report = {
        "failed": result.failures,
        "step": int(result.state.step),
        "positions": positions,
        "size": len(content),
    }
    print(
        json.dumps(
            report
            | {
                "whole_lines": content.endswith(b"\n")
                and all(map(json.loads, content.splitlines()))
            }
        )
    )


def settle(run: fg.Run) -> None:
    """Waits until the loggers have written everything."""
    for _, future in run.engine.plugins.hooks.flush_logger.each(run.step, step=run.step):
        future.result(60)


def test_training_continues_when_the_files_are_deleted(tmp_path: Path) -> None:
    def remove(run: fg.Run) -> None:
        settle(run)
        for name in FILES:
            (tmp_path / name).unlink()

    with pytest.warns(UserWarning, match="failed and gets no more records") as warned:
        result = engine(tmp_path, *loggers(), Act(fg.At(8), remove)).fit(Line, data())
    assert len(warned) == 2 and set(result.failures) == {"jsonl", "csv"}
    assert all("deleted or replaced while it was" in reason for reason in result.failures.values())
    assert int(result.state.step) == STEPS and len(result.history.records) > 5


def test_training_continues_when_the_directory_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    delete = Act(fg.At(8), lambda active_run: (settle(active_run), shutil.rmtree(run)) and None)
    with pytest.warns(
        UserWarning, match="failed and gets no more records|not marked as complete"
    ) as warned:
        result = engine(run, *loggers(), delete).fit(Line, data())
    assert len(warned) == 3 and set(result.failures) == {"jsonl", "csv", "fulgurite"}
    assert int(result.state.step) == STEPS and not run.exists()


def test_required_logger_that_fails_ends_the_run(tmp_path: Path) -> None:
    def remove(run: fg.Run) -> None:
        (tmp_path / "records.jsonl").unlink()

    expected = (FileNotFoundError, SaveError)
    with pytest.raises(expected, match="deleted or replaced while") as caught:
        engine(tmp_path, JSONLLogger(required=True), Growing(), Act(fg.At(8), remove)).fit(
            Line, data()
        )
    # Training may have ended before the logger's thread came to notice it.
    error = caught.value.__cause__ if isinstance(caught.value, SaveError) else caught.value
    assert isinstance(error, FileNotFoundError)
    assert any(note.startswith("plugin 'jsonl' (fulgurite-logging ") for note in error.__notes__)


def test_unopenable_files_are_reported_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    logger = JSONLLogger()
    with pytest.warns(UserWarning, match=r"logger 'jsonl' failed.*records\.jsonl"):
        result = engine(tmp_path, logger, CSVLogger(), steps=4).fit(Line, data())
    assert set(result.failures) == {"jsonl"}
    assert logger.flush_logger(4).result(0)["failed"]


def test_logger_that_failed_before_a_checkpoint_is_reported_on_resume(tmp_path: Path) -> None:
    def remove(run: fg.Run) -> None:
        logger.flush_logger(run.step).result(60)
        (tmp_path / "telemetry.jsonl").unlink()

    def die(run: fg.Run) -> None:
        raise KeyError("dead")

    logger, acts = JSONLLogger(), [Act(fg.At(8), remove, "remove"), Act(fg.At(13), die, "die")]
    with pytest.warns(UserWarning, match="'jsonl' failed"), pytest.raises(KeyError):
        engine(tmp_path, logger, Growing(), Keeper(12), *acts).fit(Line, data())
    before = (tmp_path / "records.jsonl").read_bytes()
    position = json.loads((tmp_path / "kept" / "12.json").read_text())["positions"]["jsonl"]
    assert position["position"] == {"records.jsonl": len(before)}
    engine(tmp_path, JSONLLogger(), Growing(), Keeper(12)).fit(
        Line, data(), resume=fg.CheckpointRef(tmp_path)
    )
    notices = [
        record["values"]["message"]
        for record in lines(tmp_path / "telemetry.jsonl")
        if "message" in record["values"]
    ]
    assert len(notices) == 1 and notices[0].startswith(
        "jsonl failed before the checkpoint of step 12: records are "
    )
    content = (tmp_path / "records.jsonl").read_bytes()
    assert content.startswith(before) and json.loads(before.splitlines()[-1])["step"] <= 10
    steps = [json.loads(line)["step"] for line in content[len(before) :].splitlines()]
    assert steps[0] == 14 and steps[-1] == STEPS


def test_the_process_ends_when_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundWriter, "timeout", 0.5)
    gate = threading.Event()
    try:
        with (
            pytest.warns(UserWarning, match="waits for logger 'jsonl'"),
            pytest.warns(
                UserWarning, match=r"it did nothing for 0\.5 s; \d+ records are not written"
            ),
        ):
            result = engine(tmp_path, Gated(gate), Growing(), steps=6).fit(Line, data())
    finally:
        gate.set()
    assert list(result.failures) == ["jsonl"]


if __name__ == "__main__":
    full(Path(sys.argv[1])) if sys.argv[2] == "full" else worker(Path(sys.argv[1]), sys.argv[2])
