"""What never answers, and a signal: the run is saved at its last step, and what blocks is named
(faults, 2)."""

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from trained import ZEROS, Counting, engine

RELEASED = threading.Event()
"""Set at the end of a test: threads that still read would be there in the tests after it."""
WRITER_NAME = "fulgurite checkpoint"


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    """End the threads that a test has abandoned."""
    yield
    RELEASED.set()
    for thread in threading.enumerate():
        if thread.name in ("fulgurite-data", "fulgurite disk", "fulgurite-heartbeat"):
            thread.join()
    RELEASED.clear()


class Blocking:
    """Ten batches an epoch. One of them does not come, but a signal a little later.

    Attributes:
        block_at: how many batches are given before that, over all epochs; None for no end.
        seconds: how long it blocks.
    """

    def __init__(self, block_at: int | None, signal: int = signal.SIGTERM, seconds: float = 99.0):
        self.block_at = block_at
        self.signal = signal
        self.seconds = seconds
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            if self.num_given == self.block_at:
                threading.Timer(0.2, os.kill, (os.getpid(), self.signal)).start()
                self.wait()
            self.num_given += 1
            yield np.full(1, number, np.float32)

    def wait(self) -> None:
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not RELEASED.is_set():
            try:
                RELEASED.wait(self.seconds)
            except Exception:  # such as a client of a server does, which tries again
                continue


def make_data(source: Any, prefetch: int, name: str = "shards") -> fg.DataSource:
    return fg.DataSource(source, prefetch=prefetch, name=name, resume="replay")


def train(run_dir: Path, data: Any, *plugins: Any, stop_timeout: float = 0.3) -> fg.FitResult:
    """Train for 30 steps, with whatever is there."""
    settings: dict[str, Any] = {"steps": 30, "log_every": 4, "stop_timeout": stop_timeout}
    plugins = (Checkpointer(100), JSONLLogger(), *plugins)
    return engine(run_dir, *plugins, **settings).fit(Counting, data, resume="auto")


def check_same_end(resumed: Path, whole: Path) -> None:
    records = [(path / "records.jsonl").read_bytes() for path in (resumed, whole)]
    assert records[0] == records[1]


@pytest.mark.full
@pytest.mark.parametrize("prefetch", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_source_that_blocks_is_abandoned(prefetch: int, tmp_path: Path) -> None:
    result = train(tmp_path / "run", make_data(Blocking(17), prefetch))
    step = int(result.state.step)
    # The source is read one batch ahead, which tells whether an epoch ends.
    assert result.stop_reason == "SIGTERM" and step == 16
    assert result.messages[-1] == (
        "the data source 'shards' kept training waiting for 0.3 s after SIGTERM and is abandoned; "
        f"the run ends at step {step}"
    )
    assert (tmp_path / "run" / "checkpoints" / f"step-{step}" / "COMMIT").exists()
    resumed = train(tmp_path / "run", make_data(Blocking(None), prefetch))
    whole = train(tmp_path / "whole", make_data(Blocking(None), prefetch))
    assert int(resumed.state.step) == 30
    assert np.array_equal(resumed.module.weight, whole.module.weight)
    check_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.full
def test_a_source_that_answers_in_time_is_not_abandoned(tmp_path: Path) -> None:
    result = train(tmp_path, make_data(Blocking(5, seconds=0.4), 0), stop_timeout=60.0)
    assert result.stop_reason == "SIGTERM" and int(result.state.step) == 5
    assert result.messages == []


@pytest.mark.full
def test_the_source_of_an_evaluation_that_blocks_leaves_it_pending(tmp_path: Path) -> None:
    def run(name: str, block_at: int | None) -> fg.FitResult:
        evaluator = Evaluator("val", make_data(Blocking(block_at), 0, "held out"), every=10)
        return train(tmp_path / name, ZEROS, evaluator)

    # The first batch is that of the check before the first step, the next ten are those of step 10.
    stopped = run("run", 15)
    assert stopped.stop_reason == "SIGTERM" and int(stopped.state.step) == 20
    assert "the data source 'held out' kept training waiting" in stopped.messages[-1]
    run("run", None)
    run("whole", None)
    check_same_end(tmp_path / "run", tmp_path / "whole")


class BlockingLogger:
    """A logger that writes on the main thread, and from a step on never returns."""

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        if record.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(99)


@pytest.mark.full
def test_a_logger_that_blocks_gets_no_more_records(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gets no more records"):
        result = train(tmp_path, ZEROS, BlockingLogger())
    (failure,) = result.failures.values()
    assert "kept training waiting for 0.3 s after SIGTERM and is abandoned" in failure
    assert result.stop_reason == "SIGTERM"
    assert (tmp_path / "checkpoints" / f"step-{int(result.state.step)}" / "COMMIT").exists()


def test_before_the_first_batch_there_is_nothing_to_save(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="'shards' kept training waiting"),
        pytest.raises(SystemExit) as ended,
    ):
        train(tmp_path / "a", make_data(Blocking(0), 2))
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt, match="0.3 s after SIGINT"):
        train(tmp_path / "b", make_data(Blocking(0, signal.SIGINT), 2))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # The next run is not disturbed by what came to an end here.
    assert int(train(tmp_path / "c", ZEROS).state.step) == 30


class BlockingCheckpointer(Checkpointer):
    """Reads a checkpoint from a disk that never answers."""

    @fg.hookimpl
    def restore_checkpoint(self, resume: Any, template: Any, engine: Any, announce: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(99)


def test_a_checkpoint_that_cannot_be_read_is_abandoned(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 4, "stop_timeout": 0.3}
    blocked = engine(tmp_path, BlockingCheckpointer(2), **settings)
    with (
        pytest.warns(UserWarning, match="the checkpoint kept training waiting"),
        pytest.raises(SystemExit),
    ):
        blocked.fit(Counting, ZEROS, resume="auto")


class UnresolvedLogger:
    """A logger that does not say where it is."""

    def __init__(self) -> None:
        self.position: Future[Any] = Future()

    @fg.hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        os.kill(os.getpid(), signal.SIGTERM)
        return self.position


class BlockedFile:
    """Puts a pipe where a file of the checkpoint of step 4 is to be written: opening it never
    returns."""

    plugin_name = "blocked"

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "checkpoints" / "saving-step-4" / "index.json"

    @fg.hookimpl
    def flush_logger(self, step: int) -> "Future[Any]":
        os.mkfifo(self.path)
        os.kill(os.getpid(), signal.SIGTERM)
        future: Future[Any] = Future()
        future.set_result(None)
        return future


def check_save_is_abandoned(
    run_dir: Path, plugin: Any, what: str, release: Callable[[], object]
) -> None:
    """Train until a save that never ends; look whether the process could end, and whether nothing
    is saved if that save continues after all."""
    settings: dict[str, Any] = {"steps": 30, "stop_timeout": 0.3, "log_every": None}
    blocked = engine(run_dir, Checkpointer(4), plugin, **settings)
    message = rf"the checkpoint of step 4 \({what}\) kept training waiting for 0.3 s after SIGTERM"
    with pytest.warns(UserWarning, match=message), pytest.raises(SystemExit) as ended:
        blocked.fit(Counting, ZEROS)
    assert ended.value.code == 143
    (writer,) = (thread for thread in threading.enumerate() if thread.name == WRITER_NAME)
    assert writer.daemon
    release()
    writer.join()
    assert not (run_dir / "checkpoints" / "step-4").exists()


@pytest.mark.full
def test_a_save_that_waits_for_a_logger_for_ever_is_abandoned(tmp_path: Path) -> None:
    logger = UnresolvedLogger()
    check_save_is_abandoned(tmp_path, logger, "logger '.*'", lambda: logger.position.set_result(1))


@pytest.mark.full
def test_a_save_to_a_disk_that_hangs_is_abandoned(tmp_path: Path) -> None:
    blocked = BlockedFile(tmp_path)
    # Whoever reads the pipe releases the thread that writes to it.
    check_save_is_abandoned(tmp_path, blocked, "index.json", blocked.path.read_bytes)


class HangingDisk:
    """A plugin after one of whose hooks, at step 4, a function never returns, and cannot be
    interrupted; SIGTERM comes at the same time."""

    plugin_name = "disk"

    def __init__(self, function: Callable[..., Any], hook: str) -> None:
        self.function = function
        self.hook = hook
        self.is_hanging = False
        self.has_returned = False

    def call(self, *arguments: Any) -> Any:
        until = time.monotonic() + 20
        while self.is_hanging and time.monotonic() < until and not RELEASED.is_set():
            try:
                RELEASED.wait(20)
            except BaseException:  # no signal handler ends a system call of such a disk
                continue
        self.has_returned = self.is_hanging
        return self.function(*arguments)

    @fg.hookimpl
    def on_save(self, step: int) -> None:
        self.hang_after("on_save", step)

    @fg.hookimpl
    def on_fit_end(self, result: fg.FitResult) -> None:
        self.hang_after("on_fit_end", 4)

    def hang_after(self, hook: str, step: int) -> None:
        if hook == self.hook and step == 4:
            self.is_hanging = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("place", "hook", "what"),
    [
        ("fulgurite_checkpoint.saving.clear", "on_save", "the folder .*saving-step-4"),
        ("fulgurite_runs.lock.read_owner", "on_fit_end", "the lock .*lock"),
        ("fulgurite_runs.directory._create", "on_fit_end", "the directory .*run"),
    ],
)
def test_a_disk_that_hangs_where_the_main_thread_needs_it_is_abandoned(
    place: str, hook: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = place.rpartition(".")
    disk = HangingDisk(getattr(importlib.import_module(module), name), hook)
    monkeypatch.setattr(place, disk.call)
    train = engine(tmp_path / "run", Checkpointer(2), disk, steps=4, stop_timeout=0.3)
    with (
        pytest.warns(UserWarning, match=rf"{what} kept training waiting for 0.3 s after SIGTERM"),
        pytest.raises(SystemExit) as ended,
    ):
        train.fit(Counting, ZEROS)
    assert ended.value.code == 143
    assert disk.is_hanging and not disk.has_returned


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), True, "30s"])
def test_the_timeout_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="stop_timeout is .*; give seconds, more than 0"):
        fg.Engine(stop_timeout=seconds)
