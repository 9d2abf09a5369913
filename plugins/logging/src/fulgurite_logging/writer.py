"""A thread that writes down what a logger is given, so that training never waits for a disk or a
network."""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fulgurite import Record
from fulgurite.redact import redact_text


class LogBackend(Protocol):
    """Where a logger writes.

    All of it is called on the writer's thread, in order; an exception is a failure."""

    def write(self, record: Record) -> None:
        """Writes one record."""

    def sync(self) -> None:
        """Makes everything that was written durable."""

    def position(self) -> Any:
        """How far it has written, as JSON, for `rewind`; after a failure, how far the output is
        complete."""

    def close(self) -> None:
        """Releases everything."""


class BackgroundWriter:
    """Passes records to a backend on its own thread, in order, through a bounded queue.

    Records gather for `rest` seconds, unless somebody waits for them, because each wake-up of the
    thread takes the interpreter from training. Training waits only while the queue is full, with
    one notice. After the first failure nothing more is written, and the next `put` and `close`
    raise it, so that the engine leaves the logger out. A backend that does nothing for `patience`
    seconds while somebody waits for it has failed too, so neither training nor the end of the
    process hangs on it.

    Args:
        name: the name of the logger, for messages.
        backend: where it writes.
        size: how many records the queue holds.
        before: called before each write; if it raises, nothing is written.
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
        self._name, self._backend, self._size, self._before = name, backend, size, pre_write
        self._work: deque[Record | Future[Any]] = (
            deque()
        )  # what is being done stays in it until it is done
        self._changed = threading.Condition()
        self._done, self._told, self._closing, self._ended, self._hurried = (
            0,
            False,
            False,
            False,
            False,
        )
        threading.Thread(target=self._run, name=f"fulgurite {name}", daemon=True).start()

    def put(self, record: Record) -> None:
        """Queues a record for writing. It must not be changed afterwards. Raises the error if
        writing has failed."""
        with self._changed:
            if len(self._work) >= self._size and not self._told:
                self._told, slow = (
                    True,
                    f"logger {self._name!r} is slower than training, which now waits for it",
                )
                warnings.warn(f"{slow}: {self._size} records are queued", stacklevel=2)
            self._wait(lambda: len(self._work) < self._size)
            if self.failure is not None:
                raise self.failure
            self._work.append(record)
            self._wake(hurry=2 * len(self._work) >= self._size)

    def durable(self) -> "Future[Any]":
        """The backend's position once everything put so far is durable; after a failure `{"failed":
        reason, "position": ...}` of what is whole."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if self._ended or self.failure is not None:
                self._answer(future)
            else:
                self._work.append(future)
                self._wake(hurry=True)
        return future

    def close(self) -> None:
        """Returns when everything is written; says so if that takes long. Raises the error if
        writing has failed."""
        with self._changed:
            self._closing = True
            self._wake(hurry=True)
            if not self._changed.wait_for(lambda: self._ended or self.failure, self.timeout / 3):
                warnings.warn(
                    f"training has ended and waits for logger {self._name!r}: {self._left()}",
                    stacklevel=2,
                )
            self._wait(lambda: self._ended)
        if self.failure is not None:
            raise self.failure

    def _wake(self, *, hurry: bool) -> None:
        if len(self._work) == 1 or (hurry and not self._hurried):
            self._hurried = hurry
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until() and self.failure is None:
            done = self._done
            if not self._changed.wait(self.timeout) and self._done == done:
                self._fail(TimeoutError(f"it did nothing for {self.timeout:g} s; {self._left()}"))

    def _left(self) -> str:
        return f"{sum(isinstance(work, Record) for work in self._work)} records are not written"

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        for work in self._work:
            if isinstance(work, Future):
                self._answer(work)
        self._work.clear()

    def _answer(self, future: "Future[Any]") -> None:
        position = self._backend.position()
        if self.failure is not None:
            position = {
                "failed": f"{type(self.failure).__name__}: {redact_text(str(self.failure))}",
                "position": position,
            }
        future.set_result(position)

    def _run(self) -> None:
        while work := self._next():
            try:
                if isinstance(work, Record):
                    self._before()
                    self._backend.write(work)
                else:
                    self._backend.sync()
            except BaseException as error:
                self._finish(error)
            else:
                self._finish()
        try:
            self._backend.close()
        except BaseException as error:
            self._finish(error)
        self._ended = True
        self._finish()

    def _next(self) -> "Record | Future[Any] | None":
        """What is to be done next; None once nothing more is to be done."""
        with self._changed:
            if not self._work:
                self._hurried = self._closing
                self._changed.wait_for(lambda: self._work or self._closing)
                self._changed.wait_for(lambda: self._hurried, self.flush_interval)
            return self._work[0] if self._work else None

    def _finish(self, error: BaseException | None = None) -> None:
        with self._changed:
            if error is not None and self.failure is None:
                self._fail(error)
            elif self._work:  # unless it was given up
                if isinstance(work := self._work.popleft(), Future):
                    self._answer(work)
            self._done += 1
            self._changed.notify_all()
