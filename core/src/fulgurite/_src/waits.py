"""What the main thread waits for outside of this library: a data source, a logger, a checkpoint.

A signal is handled in the main thread, so only the wait of that thread can be left because of one.
"""

import threading
from contextlib import AbstractContextManager
from time import monotonic
from typing import ClassVar


class WaitAbandoned(BaseException):
    """A wait was left, because training was asked to stop and what it waited for did not come.

    It is not an `Exception`: a data source that tries again after any error shall not catch it.

    Example:
        from fulgurite.plugins import WaitAbandoned

        try:
            raise WaitAbandoned("the last write", "SIGTERM", 30.0)
        except WaitAbandoned as error:
            error.what  # "the last write"

    Attributes:
        what: what was waited for.
    """

    def __init__(self, what: str, reason: str, seconds: float) -> None:
        self.what = what
        duration = f" for {seconds:g} s" if seconds else ""
        super().__init__(f"{what} kept training waiting{duration} after {reason} and is abandoned")


class Wait(AbstractContextManager["Wait", None]):
    """A wait for something that may never come. It can be entered again and again; in another
    thread than the main one nothing is noted.

    Example:
        from fulgurite.plugins import Wait

        with Wait("the answer of the server"):
            Wait.current.what  # "the answer of the server"

    Attributes:
        current: the innermost wait of the main thread, or None.
        what: what is waited for, for messages.
        patience: the argument.
        started: when it was entered, by `time.monotonic`.

    Args:
        what: what is waited for, for messages.
        patience: the seconds after a signal for which to wait; None for what the engine was given
            as `stop_timeout`.
    """

    current: ClassVar["Wait | None"] = None

    def __init__(self, what: str, patience: float | None = None) -> None:
        self.what = what
        self.patience = patience
        self.started = 0.0
        self._outer: Wait | None = None

    def __enter__(self) -> "Wait":
        if threading.current_thread() is threading.main_thread():
            self._outer = Wait.current
            self.started = monotonic()
            Wait.current = self
        return self

    def __exit__(self, *_: object) -> None:
        if Wait.current is self:
            Wait.current = self._outer
