"""Who may write to a run: one fit at a time, found out by the kernel's lock, or else by the
heartbeat."""

import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_logging import FileLogger, LogBackend
from fulgurite_runs import RunDirectory, RunPlugin, lock
from fulgurite_runs.lock import Lock, read_owner
from models import Act, Counting, numbers  # type: ignore[import-not-found]

HOLD = """
import os, sys, time
from fulgurite_runs import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    worker = bool(sys.argv[2:]) and os.fork() == 0
    if worker or not sys.argv[2:]:
        print(os.getpid(), flush=True)
    if worker:
        time.sleep(600)  # outlives its parent
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process that holds the run, and waits until it does."""
    started, workers = [], []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD, str(tmp_path), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        workers.extend([worker] * bool(arguments))
        return process

    yield start
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate()


def foreign(path: Path, age: float, **changes: Any) -> Path:
    """A lock file of an owner on another machine, whose last heartbeat is `age` seconds old."""
    owner = {
        "host": "elsewhere",
        "boot": "b",
        "pid": 1,
        "started": 0.0,
        "attempt": 4,
        "ended": False,
    } | changes
    (path / "lock").write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(path / "lock", (then, then))
    return path / "lock"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat every 50 ms; dead after 1 s."""
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lock, "DEAD", 1.0)


# --- one machine


def test_to_look_whether_a_run_is_unused_leaves_it_so(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.check_unused()
    with run.lock():
        pass
    run.check_unused()
    with run.lock():
        pass


def test_run_in_use_by_another_process_is_an_error_naming_it(
    tmp_path: Path, holder: Callable[..., Any]
):
    process = holder()
    message = rf"in use by attempt 1, process {process.pid} on .*: wait"
    with pytest.raises(CheckpointError, match=message):
        with RunDirectory(tmp_path).lock():
            pass
    with pytest.raises(CheckpointError, match=message):
        RunDirectory(tmp_path).check_unused()
    owner = RunDirectory(tmp_path).read_owner()  # readers need no lock
    assert owner and (owner[0].pid, owner[0].attempt) == (process.pid, 1)
    assert owner[0].is_running(owner[1])


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("with a worker",), marks=pytest.mark.full)]
)
def test_lock_of_a_killed_process_is_free_at_once(
    tmp_path: Path, holder: Callable[..., Any], arguments: Any
):
    """Also where a process that it had forked lives on."""
    process = holder(*arguments)
    process.kill()
    process.wait()
    owner = RunDirectory(tmp_path).read_owner()
    assert owner and not owner[0].ended and not owner[0].is_running(owner[1])
    with RunDirectory(tmp_path).lock():
        pass


def test_fits_of_one_process_follow_one_another(tmp_path: Path):
    trainer = fg.Engine(steps=3, run_dir=tmp_path, plugins=[RunPlugin()], autoload=False)
    first = trainer.fit(Counting, numbers([0]))
    second = trainer.fit(data=numbers([0]), state=first.state)
    assert float(second.module.weight) == -6
    assert RunDirectory(tmp_path).num_attempts == 2
    owner = RunDirectory(tmp_path).read_owner()
    assert owner and owner[0].ended and (owner[0].pid, owner[0].attempt) == (os.getpid(), 2)


@pytest.mark.parametrize("kind", ["run", "group"])
def test_a_lock_whose_end_cannot_be_noted_hides_no_error_and_is_free(tmp_path: Path, kind: str):
    """As `fulgurite mlflow` holds that of a run, and a follower that of a group."""
    path = tmp_path / "lock"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def hold() -> Any:
        return RunDirectory(tmp_path).lock() if kind == "run" else Lock(path, attempt=1)

    try:
        with pytest.raises(RuntimeError, match="on purpose") as caught, hold():
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            raise RuntimeError("on purpose")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (note,) = caught.value.__notes__
    assert f"{path} could not be updated at the end of attempt 1" in note
    owner = read_owner(path)
    assert owner is not None and not owner[0].ended
    with hold():
        pass


@pytest.mark.full
def test_two_fits_on_one_run_at_once_are_an_error(tmp_path: Path):
    def within(run: fg.Run) -> None:
        fg.Engine(steps=1, run_dir=tmp_path, plugins=[RunPlugin()], autoload=False).fit(
            Counting, numbers([0])
        )

    with pytest.raises(CheckpointError, match=rf"in use by attempt 1, process {os.getpid()}"):
        fg.Engine(
            steps=3, run_dir=tmp_path, plugins=[RunPlugin(), Act(fg.At(2), within)], autoload=False
        ).fit(Counting, numbers([0]))
    fg.Engine(steps=3, run_dir=tmp_path, plugins=[RunPlugin()], autoload=False).fit(
        Counting, numbers([0])
    )  # the lock went with the fit


def test_fit_that_fails_before_its_first_step_releases_the_lock(tmp_path: Path):
    trainer = fg.Engine(steps=3, run_dir=tmp_path, plugins=[RunPlugin()], autoload=False)
    with pytest.raises(Exception, match="no batch"):
        trainer.fit(Counting, [])
    assert RunDirectory(tmp_path).num_attempts == 0
    assert trainer.fit(Counting, numbers([0])).stop_reason is None


def test_fast_dev_run_takes_no_lock(tmp_path: Path):
    fg.Engine(steps=3, run_dir=tmp_path / "run", fast_dev_run=1, autoload=False).fit(
        Counting, numbers([0])
    )
    assert not (tmp_path / "run").exists()


# --- other machines


@pytest.mark.parametrize(
    "changes", [{}, {"host": platform.node()}], ids=["other host", "other boot"]
)
def test_remote_owner_without_a_heartbeat_for_a_minute_is_dead(
    tmp_path: Path, changes: dict[str, str]
):
    path = foreign(tmp_path, 61.0, **changes)
    with RunDirectory(tmp_path).lock():
        owner = read_owner(path)
        assert owner and owner[0].is_local


def test_remote_owner_that_ended_is_not_waited_for(tmp_path: Path):
    foreign(tmp_path, 0.0, ended=True)
    with RunDirectory(tmp_path).lock():
        pass


@pytest.mark.full
@pytest.mark.parametrize("age", [0.0, -9e6], ids=["now", "from before a clock was put back"])
def test_remote_owner_is_waited_for_until_it_is_dead(tmp_path: Path, quick: None, age: float):
    foreign(tmp_path, age)
    with pytest.warns(
        UserWarning, match=r"last used by attempt 4, process 1 on elsewhere.* waiting up to \d s"
    ):
        with RunDirectory(tmp_path).lock():
            pass


def test_remote_owner_with_a_heartbeat_keeps_the_lock(tmp_path: Path, quick: None):
    path, over = foreign(tmp_path, 0.0), threading.Event()

    def live() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with (
            pytest.warns(UserWarning, match="waiting"),
            pytest.raises(CheckpointError, match="in use by attempt 4"),
        ):
            Lock(path, 5)
    finally:
        over.set()
        thread.join()


@pytest.mark.full
def test_stale_file_server_lock_of_a_dead_machine_is_replaced(
    tmp_path: Path, holder: Callable[..., Any]
):
    """Its file is left to it: the process that holds it finds another one in its place."""
    holder()
    inode = (tmp_path / "lock").stat().st_ino
    foreign(tmp_path, 61.0)
    with RunDirectory(tmp_path).lock():
        assert (tmp_path / "lock").stat().st_ino != inode
        assert (tmp_path / "lock.4").stat().st_ino == inode


def test_process_that_lost_the_lock_stops_before_its_next_write(tmp_path: Path):
    saved: list[int] = []

    class Saving(RunPlugin):
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("save", 1, fg.Run.save, "save")]

        @fg.hookimpl
        def save_checkpoint(self, run: fg.Run) -> None:
            run.run_dir.assert_locked()
            saved.append(run.step)

    take = Act(fg.At(3), lambda run: foreign(tmp_path, 0.0, attempt=2) and None)
    with pytest.raises(
        CheckpointError,
        match=r"taken over by attempt 2, process 1 on elsewhere: this process had shown",
    ):
        fg.Engine(steps=5, run_dir=tmp_path, plugins=[Saving(), take], autoload=False).fit(
            Counting, numbers([0])
        )
    assert saved == [1, 2]
    assert not RunDirectory(tmp_path).is_complete
    owner = read_owner(tmp_path / "lock")
    assert owner and owner[0].attempt == 2 and not owner[0].ended  # left to its new owner


def test_recent_check_is_not_repeated(tmp_path: Path):
    run = RunDirectory(tmp_path)
    with run.lock():
        foreign(tmp_path, 0.0, attempt=2)
        run.assert_locked(within=3600)
        with pytest.raises(CheckpointError, match="taken over by attempt 2"):
            run.assert_locked()
        with pytest.raises(CheckpointError, match="taken over by attempt 2"):
            run.assert_locked(within=0.0)


def test_process_that_lost_the_lock_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As by a process that another one took for dead, and that continues as if nothing had been."""
    written: list[int] = []

    class Backend:
        def write(self, record: fg.Record) -> None:
            written.append(record.step)

        def sync(self) -> None: ...
        def close(self) -> None: ...
        def get_position(self) -> int:
            return len(written)

    class Numbers(FileLogger):
        plugin_name = "numbers"

        def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
            return Backend()

    def take(run: fg.Run) -> None:
        numbers_logger.flush_logger(run.step).result()  # what came before is written
        foreign(tmp_path, 0.0, attempt=2)
        monkeypatch.setattr(
            time, "clock_gettime", lambda clock, now=time.clock_gettime: now(clock) + 60
        )

    numbers_logger = Numbers()
    trainer = fg.Engine(
        steps=6,
        log_every=1,
        run_dir=tmp_path,
        plugins=[numbers_logger, Act(fg.At(3), take)],
        autoload=False,
    )
    with (
        pytest.warns(UserWarning, match="taken over"),
        pytest.raises(CheckpointError, match="taken over"),
    ):
        trainer.fit(Counting, numbers([0]))
    assert sorted(set(written)) == [1, 2, 3]


def test_the_heartbeat_is_renewed(tmp_path: Path, quick: None):
    held = Lock(tmp_path / "lock", 1)
    os.utime(tmp_path / "lock", (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - (tmp_path / "lock").stat().st_mtime < 60
    held.release()


@pytest.mark.parametrize("replacement", [None, "empty", "copy"])
def test_a_lock_file_that_was_deleted_or_replaced_is_lost(
    tmp_path: Path, quick: None, replacement: str | None
):
    """Issue 22, point 6. A copy names the same owner, but the kernel's lock is on the old file."""
    path = tmp_path / "lock"
    held = Lock(path, 1)
    held.check()
    content = path.read_bytes()
    path.rename(tmp_path / "moved")
    if replacement is not None:
        path.write_bytes(content if replacement == "copy" else b"")
    with pytest.raises(CheckpointError, match="was deleted or replaced while this process held it"):
        held.check()
    held.release()
    assert path.exists() == (replacement is not None)


@pytest.mark.full
def test_a_run_begun_where_another_was_deleted_is_no_takeover(
    tmp_path: Path, holder: Callable[..., Any]
):
    held = Lock(tmp_path / "lock", 1)
    (tmp_path / "lock").unlink()
    process = holder()
    with pytest.raises(CheckpointError) as caught:
        held.check()
    held.release()
    assert (
        f"was deleted or replaced while this process held it, and attempt 1, process {process.pid} "
    ) in str(caught.value)
    owner = RunDirectory(tmp_path).read_owner()
    assert owner and owner[0].pid == process.pid and not owner[0].ended


def test_a_lock_file_that_was_set_aside_is_a_takeover(tmp_path: Path):
    """What another machine does where a file server still keeps the lock of a dead owner."""
    held = Lock(tmp_path / "lock", 1)
    (tmp_path / "lock").rename(tmp_path / "lock.1")
    foreign(tmp_path, 0.0, attempt=2)
    with pytest.raises(CheckpointError, match="was taken over by attempt 2"):
        held.check()
    held.release()


# --- files that are not ours


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        "null",
        "x" * 5000,
        "[" * 900,
        '{"host": 1, "boot": 2, "pid": "x", "started": 0, "attempt": 1}',
        '{"host": "a", "boot": "b", "pid": 1' + "0" * 30 + ', "started": 0, "attempt": 1}',
        '{"host": "a", "boot": "b", "pid": 3, "started": 0, "attempt": 1' + "0" * 500 + "}",
        '{"host": "\\u001b[2J", "boot": "b", "pid": 3, "started": 0, "attempt": 1}',
    ],
)
def test_foreign_lock_file_has_no_owner(tmp_path: Path, content: str):
    (tmp_path / "lock").write_text(content)
    assert RunDirectory(tmp_path).read_owner() is None
    with RunDirectory(tmp_path).lock():
        owner = RunDirectory(tmp_path).read_owner()
        assert owner and owner[0].pid == os.getpid()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("victim"), Path.mkdir, os.mkfifo])
def test_lock_that_is_not_a_regular_file_is_an_error(tmp_path: Path, make: Callable[[Path], None]):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / "lock")
    with pytest.raises(CheckpointError, match=r"cannot be written|not a regular file"):
        with RunDirectory(tmp_path / "run").lock():
            pass
    assert RunDirectory(tmp_path / "run").read_owner() is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# --- processes that are forked, and threads that cannot be started


FORK = """
import os, sys
from fulgurite.errors import CheckpointError
from fulgurite_runs import RunDirectory
def wait(child):
    assert os.waitpid(child, 0)[1] == 0
run = RunDirectory(sys.argv[1])
with run.lock():
    child = os.fork()
    if child == 0:
        # Of the number that the lock's file had.
        own = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
        os.write(own, b"of the worker")
        grandchild = os.fork()
        if grandchild == 0:
            os.fstat(own)
            os._exit(0)
        wait(grandchild)
        try:
            run.assert_locked()
        except CheckpointError as error:
            print(error)
    else:
        wait(child)
        run.assert_locked()
if child == 0:
    os.fstat(own)
"""


@pytest.mark.full
def test_a_forked_process_has_no_lock_and_keeps_its_own_files(tmp_path: Path):
    """Also where a worker forks in turn, and where it leaves the block that holds the run."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "run"), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"in use by attempt 1, .* from which this process was forked", done.stdout)
    assert (tmp_path / "file").read_text() == "of the worker"
    owner = RunDirectory(tmp_path / "run").read_owner()
    assert owner and owner[0].ended


def test_a_lock_without_a_thread_for_its_heartbeat_is_an_error_and_free(
    tmp_path: Path,
):
    run = RunDirectory(tmp_path)
    former = threading.stack_size(1 << 47)  # more than there are addresses
    try:
        with pytest.raises(CheckpointError, match="the system starts no thread for the heartbeat"):
            with run.lock():
                pass
    finally:
        threading.stack_size(former)
    with run.lock():
        run.assert_locked()
