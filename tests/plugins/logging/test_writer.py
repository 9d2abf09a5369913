"""A writer's thread: order, a bounded queue, failures, and an end that hangs on nothing."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import pytest
from fulgurite_logging import BackgroundWriter


def record(step: int) -> fg.Record:
    return fg.Record("scalars", "train", step, {})


@dataclass
class Memory:
    """A backend that keeps the steps of its records; `before` is called before each is written."""

    before: Callable[[int], Any] = lambda step: None
    steps: list[int] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    closed: bool = False

    def write(self, record: fg.Record) -> None:
        assert (
            threading.current_thread().daemon
            and threading.current_thread() is not threading.main_thread()
        )
        self.before(record.step)
        self.steps.append(record.step)

    def sync(self) -> None:
        self.synced.append(len(self.steps))

    def get_position(self) -> int:
        return len(self.steps)

    def close(self) -> None:
        self.closed = True


def stuck(at: int, release: threading.Event) -> Callable[[int], None]:
    """Waits for `release` before step `at` is written."""

    def wait(step: int) -> None:
        if step == at:
            assert release.wait(60)

    return wait


def fail_at(at: int) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step == at:
            raise OSError(f"no space for {step}, token=abc")

    return fail


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundWriter, "timeout", 0.2)


def test_records_are_written_in_order_and_all_of_them_by_the_end_B21() -> None:
    backend = Memory()
    writer = BackgroundWriter("memory", backend, size=10_000)
    for step in range(2000):
        writer.put(record(step))
    writer.close()
    assert backend.steps == list(range(2000)) and backend.closed


def test_a_position_is_that_of_the_records_before_it() -> None:
    release, backend = threading.Event(), Memory()
    backend.before = stuck(0, release)
    writer, futures = BackgroundWriter("memory", backend), []
    for step in range(6):
        writer.put(record(step))
        if step % 2:
            futures.append(writer.flush())
    assert not any(future.done() for future in futures) and not futures[0].cancel()
    release.set()
    assert [future.result(60) for future in futures] == [2, 4, 6] == backend.synced
    writer.close()
    assert writer.flush().result(0) == 6


def test_training_waits_only_for_a_full_queue_and_says_so_once() -> None:
    release, backend = threading.Event(), Memory()
    backend.before = stuck(0, release)
    writer = BackgroundWriter("slow", backend, size=3)
    for step in range(3):
        writer.put(record(step))  # does not wait: nothing is written yet
    assert backend.steps == []
    with pytest.warns(
        UserWarning, match=r"'slow' is slower than training.*: 3 records are queued"
    ) as warned:
        threading.Timer(0.1, release.set).start()
        for step in range(3, 40):
            writer.put(record(step))
    writer.close()
    assert len(warned) == 1 and backend.steps == list(range(40))


def test_first_failure_ends_writing_and_is_raised_at_the_next_call() -> None:
    backend = Memory(fail_at(2))
    writer = BackgroundWriter("failing", backend)
    writer.put(record(1))
    writer.put(record(2))
    position = writer.flush().result(60)
    assert position == {"failed": "OSError: no space for 2, token=***", "position": 1}
    for call in (lambda: writer.put(record(3)), writer.close, writer.close):
        with pytest.raises(OSError, match="no space for 2"):
            call()
    assert backend.steps == [1] and backend.synced == []
    assert writer.flush().result(0) == position


def test_failure_to_sync_or_close_is_raised() -> None:
    class Unsynced(Memory):
        def sync(self) -> None:
            raise OSError("no sync")

    class Unclosed(Memory):
        def close(self) -> None:
            raise OSError("no close")

    writer = BackgroundWriter("unsynced", Unsynced())
    assert writer.flush().result(60) == {"failed": "OSError: no sync", "position": 0}
    with pytest.raises(OSError, match="no sync"):
        writer.close()
    with pytest.raises(OSError, match="no close"):
        BackgroundWriter("unclosed", Unclosed()).close()


@pytest.mark.usefixtures("impatient")
def test_hanging_backend_delays_nothing() -> None:
    release, backend = threading.Event(), Memory()
    backend.before = stuck(1, release)
    writer = BackgroundWriter("hung", backend)
    for step in range(4):
        writer.put(record(step))
    future = writer.flush()
    try:
        message = "training has ended and waits for logger 'hung': 3 records are not written"
        with (
            pytest.warns(UserWarning, match=message),
            pytest.raises(
                TimeoutError, match=r"it did nothing for 0\.2 s; 3 records are not written"
            ),
        ):
            writer.close()
        assert future.result(0) == {"failed": f"TimeoutError: {writer.failure}", "position": 1}
    finally:
        release.set()


@pytest.mark.usefixtures("impatient")
def test_training_continues_without_a_hanging_backend() -> None:
    release, backend = threading.Event(), Memory()
    backend.before = stuck(0, release)
    writer = BackgroundWriter("hung", backend, size=2)
    try:
        with pytest.warns(UserWarning, match="slower than training"), pytest.raises(TimeoutError):
            for step in range(3):
                writer.put(record(step))
    finally:
        release.set()
