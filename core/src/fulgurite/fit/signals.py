"""Requests to stop that come from outside: Ctrl-C and SIGTERM."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any


class StopRequests:
    """Notes the first of `signals` while it is entered; a second one acts as if nobody had
    listened.

    Training reads `requested` between steps and between evaluation batches. Outside of the main
    thread, where Python does not deliver signals, it does nothing.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.requested: str | None = None
        self._signals = tuple(signals)
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
