"""A thread that writes what a logger receives: training never waits for a disk or a network."""

import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fulgurite import Record
from fulgurite.plugins import format_error


class LogBackend(Protocol):
    """Where a logger writes.

    All of it is called on the writer's thread, in order; an exception is a failure.

    Example:
        class PrintBackend:
            def write(self, record):
                print(record.step, record.values)

            def sync(self):
                pass

            def get_position(self):
                return None

            def close(self):
                pass
    """

    def write(self, record: Record) -> None:
        """Write one record."""

    def sync(self) -> None:
        """Make everything that was written durable."""

    def get_position(self) -> Any:
        """Return how far it has written, as JSON, for `rewind_logger`.

        After a failure, how far the output is complete. This alone may be called on another thread.
        """

    def close(self) -> None:
        """Release everything."""


class BackgroundWriter:
    """Pass records to a backend on a thread of its own, in order, through a bounded queue.

    Training waits only while the queue is full, and is told so once by a warning. After the first
    failure nothing more is written, and each `put` and `close` raises it, so that the engine leaves
    the logger out. A backend that makes no progress for `timeout` seconds while somebody waits for
    it has failed too: neither training nor the end of the process hangs on it.

    Example:
        from pathlib import Path

        from fulgurite_logging import BackgroundWriter, JSONLBackend

        writer = BackgroundWriter("mine", JSONLBackend(Path(), None))  # in open_logger
        writer.put(fg.Record("scalars", "train", 10, {"loss": 0.5}))  # in log_record
        writer.close()  # in close_logger

    Attributes:
        timeout: seconds without progress after which the backend has failed.
        flush_interval: seconds for which records gather before the thread writes them, unless
            somebody waits or the queue is half full: each time that the thread wakes up it takes
            the interpreter from training.
        failure: the first failure, or None.

    Args:
        name: the name of the logger, for messages.
        backend: where it writes.
        size: how many records the queue holds.
        pre_write: called before each write; if it raises, nothing is written.
    """

    timeout: float = 30.0
    flush_interval: float = 0.2

    def __init__(
        self,
        name: str,
        backend: LogBackend,
        *,
        size: int = 1000,
        pre_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: BaseException | None = None
        self._name = name
        self._backend = backend
        self._size = size
        self._pre_write = pre_write
        self._items = queue.SimpleQueue[Record | Future[Any] | None]()
        self._free_slots = threading.BoundedSemaphore(size)
        self._flush_now = threading.Event()
        self._ended = threading.Event()
        # Guards the unanswered futures, `failure` and `_ended`: the waiting thread declares a hung
        # backend failed while the writer's thread may just have continued.
        self._lock = threading.Lock()
        self._unanswered: list[Future[Any]] = []
        self._num_put = 0
        self._num_written = 0
        self._num_done = 0
        self._warned_full = False
        # Not a ThreadPoolExecutor, whose thread is not a daemon: the interpreter joins it at its
        # end, and would wait forever for a disk that hangs.
        threading.Thread(target=self._run, name=f"fulgurite {name}", daemon=True).start()

    def put(self, record: Record) -> None:
        """Queue a record, which must not be changed afterwards; raise the failure, if any."""
        if not self._free_slots.acquire(blocking=False):
            self._flush_now.set()
            self._warn_full()
            self._wait(lambda timeout: self._free_slots.acquire(timeout=timeout))
        self._raise_failure()
        self._num_put += 1
        self._items.put(record)
        if 2 * (self._num_put - self._num_written) >= self._size:
            self._flush_now.set()

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait for the backend."""
        return self.failure is None and self._num_put - self._num_written >= self._size

    def fail(self, error: BaseException) -> None:
        """Give the backend up, unless it has failed already: nothing more is written."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            for future in list(self._unanswered):
                self._answer(future)

    def flush(self) -> "Future[Any]":
        """Return the backend's position as a future that is done once all records so far are
        durable; after a failure `{"failed": reason, "position": ...}` of what is complete."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._unanswered.append(future)
            if self._ended.is_set() or self.failure is not None:
                self._answer(future)
                return future
        self._items.put(future)
        self._flush_now.set()
        return future

    def close(self) -> None:
        """Wait until everything is written, with a warning if that takes long; raise the failure,
        if any."""
        self._items.put(None)
        self._flush_now.set()
        if self.failure is None and not self._ended.wait(self.timeout / 3):
            warnings.warn(
                f"training has ended and waits for logger {self._name!r}: "
                f"{self._describe_unwritten()}",
                stacklevel=2,
            )
        self._wait(self._ended.wait)
        self._raise_failure()

    def _warn_full(self) -> None:
        if self._warned_full or self.failure is not None:
            return
        self._warned_full = True
        warnings.warn(
            f"logger {self._name!r} is slower than training, which now waits for it: "
            f"{self._size} records are queued",
            stacklevel=3,
        )

    def _wait(self, wait: Callable[[float], bool]) -> None:
        """Wait until `wait(timeout)` is true or the writer fails, as long as it makes progress."""
        while self.failure is None:
            num_done = self._num_done
            if wait(self.timeout):
                return
            if self._num_done == num_done:
                self.fail(
                    TimeoutError(
                        f"it did nothing for {self.timeout:g} s; {self._describe_unwritten()}"
                    )
                )

    def _describe_unwritten(self) -> str:
        return f"{self._num_put - self._num_written} records are not written"

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _answer(self, future: "Future[Any]") -> None:
        """Resolve a future, unless a failure has done it. The caller holds the lock."""
        if future not in self._unanswered:
            return
        self._unanswered.remove(future)
        position = self._backend.get_position()
        if self.failure is not None:
            reason = format_error(self.failure)
            position = {"failed": reason, "position": position}
        future.set_result(position)

    # --- on the writer's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next_item()) is not None:
            try:
                self._process(item)
            except BaseException as error:
                self.fail(error)
            self._num_done += 1
        try:
            self._backend.close()
        except BaseException as error:
            self.fail(error)
        with self._lock:
            self._ended.set()
            for future in list(self._unanswered):
                self._answer(future)

    def _next_item(self) -> "Record | Future[Any] | None":
        """Return the next record, or future to answer, or None at the end; let records gather."""
        try:
            return self._items.get_nowait()
        except queue.Empty:
            self._flush_now.clear()
        item = self._items.get()
        if isinstance(item, Record):
            self._flush_now.wait(self.flush_interval)
        return item

    def _process(self, item: "Record | Future[Any]") -> None:
        if isinstance(item, Record):
            try:
                if self.failure is None:
                    self._pre_write()
                    self._backend.write(item)
                    self._num_written += 1
            finally:
                self._free_slots.release()
        elif self.failure is None:
            self._backend.sync()
            with self._lock:
                self._answer(item)
