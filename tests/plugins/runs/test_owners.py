"""Whether an owner runs, the numbers of attempts of those who wait, and locks without an attempt."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fulgurite.errors import CheckpointError
from fulgurite_runs import RunDirectory, lock
from fulgurite_runs.lock import read_owner


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The number of a process that has nothing to do with any run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def write_owner(folder: Path, pid: int, started: float, heartbeat: float) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    owner = {"host": platform.node(), "boot": boot, "pid": pid, "started": started}
    (folder / "lock").write_text(json.dumps(owner | {"attempt": 1, "ended": False}))
    os.utime(folder / "lock", (heartbeat, heartbeat))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the start of processes is unknown")
@pytest.mark.parametrize(
    ("started", "heartbeat", "is_running"),
    [
        (-1000.0, -1000.0, False),  # another process has its number
        (60.0, -1000.0, True),  # it was stopped, and can continue
        (-1000.0, 0.0, True),  # the clock was put forward while it trains
        (60.0, 0.0, True),
    ],
)
def test_an_owner_runs_if_the_process_with_its_number_is_it(
    tmp_path: Path, sleeper: int, started: float, heartbeat: float, is_running: bool
) -> None:
    now = time.time()
    write_owner(tmp_path, sleeper, now + started, now + heartbeat)
    entry = read_owner(tmp_path / "lock")
    assert entry is not None
    owner, last_heartbeat = entry
    assert owner.is_running(last_heartbeat) is is_running


def test_who_waited_while_another_fit_began_is_told_to_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes wait for an owner that is dead; one of them has trained when the other gets the
    lock, with the number that the first one has used."""
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lock, "DEAD", 1.0)
    owner = {"host": "elsewhere", "boot": "b", "pid": 1, "started": 0.0, "attempt": 1}
    (tmp_path / "lock").write_text(json.dumps(owner | {"ended": False}))

    def begin_after_the_warning() -> None:
        while not len(caught):
            time.sleep(0.01)
        RunDirectory(tmp_path).start_attempt("{}")

    other = threading.Thread(target=begin_after_the_warning)
    with pytest.warns(UserWarning, match="waiting up to") as caught:
        other.start()
        with pytest.raises(CheckpointError, match="another fit began .* start again"):
            with RunDirectory(tmp_path).lock():
                pass
    other.join()
    assert json.loads((tmp_path / "lock").read_text()) == owner | {"ended": False}
    assert (tmp_path / "attempts" / "1").read_text() == "{}"


def test_a_reserved_run_is_in_use_and_belongs_to_its_owner_afterwards(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.lock():
        run.start_attempt("{}")
    content = (tmp_path / "lock").read_bytes()
    os.utime(tmp_path / "lock", (1e9, 1e9))
    with run.reserve():
        run.assert_locked()
        with pytest.raises(CheckpointError, match="is in use"):
            RunDirectory(tmp_path).check_unused()
    assert (tmp_path / "lock").read_bytes() == content
    assert (tmp_path / "lock").stat().st_mtime == 1e9
    assert run.num_attempts == 1
    RunDirectory(tmp_path).check_unused()
    with pytest.raises(ZeroDivisionError), RunDirectory(tmp_path / "new").reserve():
        _ = 1 / 0
    assert RunDirectory(tmp_path / "new").read_owner() is None
