"""Requests to stop that come from outside: Ctrl-C and SIGTERM."""

import signal
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

from fulgurite.waits import Wait, WaitAbandoned


class StopRequests:
    """Notes the first of `signals` while it is entered; a second one acts as if nobody had
    listened.

    Training reads `requested` between steps and between evaluation batches. Where the main thread
    waits and nothing comes for `timeout` seconds after the signal, the wait is left by a
    `WaitAbandoned`. If nobody catches that, nothing was trained that could be saved: the program
    ends as the signal would have ended it, but releases what it holds.

    Outside of the main thread, where Python does not deliver signals, it does nothing.

    Args:
        signals: to listen to.
        timeout: in seconds; None to wait for ever, as one of several processes must, which cannot
            stop alone.
    """

    def __init__(self, signals: Iterable[signal.Signals], timeout: float | None = None) -> None:
        self.requested: str | None = None
        self._signals = tuple(signals)
        self._timeout = timeout
        self._former: dict[int, Any] = {}
        self._received: int | None = None
        self._is_over = False
        self._expired: tuple[Wait, float] | None = None
        # Held while a signal is sent, so that none comes after the end.
        self._lock = threading.RLock()
        # A handler may interrupt any code of `threading`, with its locks held: it starts no thread
        # and sets no event. This queue's `put` is made for it.
        self._wake_watcher = SimpleQueue[None]()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._signals:
            self._former[number] = signal.signal(number, self._receive)
        if self._timeout is not None:
            self._watcher = threading.Thread(
                target=self._watch, args=(self._timeout,), name="fulgurite-signals", daemon=True
            )
            self._watcher.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        with self._lock:
            self._is_over = True
        self._wake_watcher.put(None)
        if self._watcher is not None:
            self._watcher.join()
        self._restore()
        if isinstance(error, WaitAbandoned):
            number = self._received
            if number == signal.SIGINT:
                raise KeyboardInterrupt(str(error)) from error
            # The exit of a program prints no message of its own.
            warnings.warn(str(error), stacklevel=2)
            raise SystemExit(128 + (number or 0)) from error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, from outside or from `_watch`."""
        if self._received is None:
            self._received = number
            self.requested = signal.Signals(number).name
            self._wake_watcher.put(None)
        elif self._expired is not None:
            wait, started = self._expired
            self._expired = None
            # What it waited for may have come in the meantime.
            if Wait.current is wait and wait.started == started:
                Wait.current = None
                raise WaitAbandoned(wait.what, str(self.requested), self._timeout or 0.0)
        elif not self._is_over:
            with self._lock:
                self._is_over = True
            self._restore()
            signal.raise_signal(number)

    def _watch(self, timeout: float) -> None:
        """After a signal, send it again to the main thread where that waits too long: this alone
        ends a system call."""
        self._wake_watcher.get()
        received_at = monotonic()
        main_thread = threading.main_thread().ident
        while not self._is_over:
            with suppress(Empty):
                self._wake_watcher.get(timeout=min(timeout / 4, 0.5))
            wait = Wait.current
            if wait is None or monotonic() - max(wait.started, received_at) < timeout:
                continue
            with self._lock:
                if not self._is_over and self._received is not None and main_thread is not None:
                    self._expired = wait, wait.started
                    signal.pthread_kill(main_thread, self._received)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
