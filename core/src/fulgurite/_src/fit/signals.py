"""Requests to stop that come from outside: Ctrl-C and SIGTERM."""

import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any, ClassVar, NamedTuple, NoReturn

from fulgurite._src.sharding import ProcessSync
from fulgurite._src.waits import Wait, WaitAbandoned
from fulgurite.errors import EvaluationInterrupted


class StopRequests:
    """Notes the first of `signals` while it is entered; a second one acts as if nobody had
    listened.

    Training reads `requested` between steps and between evaluation batches. Where the main thread
    waits and nothing comes for `timeout` seconds after the signal, the wait is left by a
    `WaitAbandoned`. If nobody catches that, nothing was trained that could be saved: the program
    ends as the signal would have ended it, but releases what it holds.

    A signal is for the whole process. The outermost fit listens, and fits within it read what it
    heard, so that all stop, from the inside out. A fit that a signal stopped in the middle of an
    action of another one gives up that action: its result would be that of too few steps. A
    program that begins yet another fit after a signal is ended there, by `raise_unanswered`.

    Outside of the main thread, where Python does not deliver signals, nothing is listened to.

    Attributes:
        is_in_action: whether the fit that this belongs to runs an action.
        stopped_by: why the fit ended before its planned end, or None.

    Args:
        signals: to listen to.
        timeout: in seconds; None to wait forever, as one of several processes must, which cannot
            stop alone.
    """

    _innermost: ClassVar["StopRequests | None"] = None
    _unanswered: ClassVar["UnansweredStop | None"] = None

    def __init__(self, signals: Iterable[signal.Signals], timeout: float | None = None) -> None:
        self.is_in_action = False
        self.stopped_by: str | None = None
        self._signals = tuple(signals)
        self._timeout = timeout
        self._reason: str | None = None
        self._enclosing: StopRequests | None = None
        self._listener: StopRequests = self
        self._former: dict[int, Any] = {}
        self._received: int | None = None
        self._is_over = False
        self._expired: tuple[Wait, float, float] | None = None
        # What the program's own handler raised, until everything is saved.
        self._held_exception: BaseException | None = None
        # Held while a signal is sent, so that none comes after the end.
        self._lock = threading.RLock()
        # A handler may interrupt any code of `threading`, with its locks held: it starts no thread
        # and sets no event. This queue's `put` is made for it.
        self._wake_watcher = SimpleQueue[None]()
        self._watcher: threading.Thread | None = None
        # Of the main thread, which alone handles signals: another one in a forked process.
        self._thread_id: int | None = None

    @property
    def requested(self) -> str | None:
        """Why training is to stop: the name of a signal, or the reason of a plugin."""
        if self._reason is not None:
            return self._reason
        enclosing = self._enclosing
        if enclosing is None:
            return self._listener._get_signal_name()
        # One of several processes cannot stop alone, nor in the middle of what it does for itself.
        is_part_of_many = enclosing._timeout is None and self._timeout is not None
        return None if is_part_of_many else enclosing.requested

    def request(self, reason: str) -> None:
        """Note that a plugin wants to stop; the first reason counts."""
        self._reason = self.requested or reason

    def __enter__(self) -> "StopRequests":
        enclosing = StopRequests._innermost
        if enclosing is not None:
            self._listener = enclosing._listener
        if threading.current_thread() is not threading.main_thread():
            return self
        if enclosing is None:
            self._listen()
        StopRequests._innermost = self
        self._enclosing = enclosing
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if StopRequests._innermost is not self:
            return
        StopRequests._innermost = self._enclosing
        if self._enclosing is None:
            self._stop_listening()
            self._answer(error)
        elif self._enclosing.is_in_action:
            self._give_up_action(self._enclosing, error)

    def _listen(self) -> None:
        if self._timeout is not None:
            self._watcher = threading.Thread(
                target=self._watch, args=(self._timeout,), name="fulgurite-signals", daemon=True
            )
            # Before any handler is set: the system may start no further thread.
            self._watcher.start()
        self._thread_id = threading.get_native_id()
        for number in self._signals:
            # None is a handler in C, such as that of JAX, which could not be restored.
            if signal.getsignal(number) is not None:
                self._former[number] = signal.signal(number, self._receive)

    def _stop_listening(self) -> None:
        with self._lock:
            self._is_over = True
        self._wake_watcher.put(None)
        if self._watcher is not None:
            self._watcher.join()
        self._restore()

    def _answer(self, error: BaseException | None) -> None:
        """Raise what a signal has left to raise at the end of the outermost fit, or note that the
        program is to answer it."""
        # Of several processes only one may have received it.
        is_signal = self.stopped_by in signal.Signals.__members__
        name = self._get_signal_name() or (self.stopped_by if is_signal else None)
        if isinstance(error, WaitAbandoned):
            _end_program(name, str(error), error)
        if error is None and self._held_exception is not None:
            raise self._held_exception
        if name is not None and (error is None or isinstance(error, Exception)):
            StopRequests._unanswered = UnansweredStop(name, _find_cell())

    def _give_up_action(self, enclosing: "StopRequests", error: BaseException | None) -> None:
        """Raise `EvaluationInterrupted` if what stops the enclosing fit has ended this one."""
        is_signal = self.stopped_by in signal.Signals.__members__
        is_same = self.stopped_by is not None and self.stopped_by == enclosing.requested
        if isinstance(error, WaitAbandoned) or (error is None and (is_signal or is_same)):
            raise EvaluationInterrupted(
                f"a fit within an action was stopped by {self.stopped_by or self.requested}"
            ) from error

    def _get_signal_name(self) -> str | None:
        """Return the name of the signal that was received, or None."""
        return None if self._received is None else signal.Signals(self._received).name

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, from outside or from `_watch`."""
        if threading.get_native_id() != self._thread_id and number != signal.SIGINT:
            # A forked process, in which nobody asks whether a signal has come: who ends it would
            # wait forever. Ctrl-C comes to all processes, and the fit needs them for its step.
            self._restore()
            signal.raise_signal(number)
        elif self._received is None:
            self._received = number
            self._wake_watcher.put(None)
            self._call_former(number, frame)
        elif self._expired is not None:
            wait, started, seconds = self._expired
            self._expired = None
            # What it waited for may have come in the meantime.
            if Wait.current is wait and wait.started == started:
                Wait.current = None
                raise WaitAbandoned(wait.what, str(self.requested), seconds)
        elif not self._is_over:
            with self._lock:
                self._is_over = True
            self._restore()
            signal.raise_signal(number)

    def _call_former(self, number: int, frame: FrameType | None) -> None:
        """Call the program's own handler of a signal. What it raises, such as `SystemExit`, would
        lose what was trained: it is raised when the fit has ended."""
        former = self._former.get(number)
        if not callable(former) or former is signal.default_int_handler:
            return
        try:
            former(number, frame)
        except BaseException as error:
            self._held_exception = error

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
            if wait is None:
                continue
            seconds = timeout if wait.patience is None else wait.patience
            if monotonic() - max(wait.started, received_at) < seconds:
                continue
            with self._lock:
                if not self._is_over and self._received is not None and main_thread is not None:
                    self._expired = wait, wait.started, seconds
                    signal.pthread_kill(main_thread, self._received)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()


class UnansweredStop(NamedTuple):
    """A signal that a fit took for a request to stop, and the program has not seen yet.

    Attributes:
        name: of the signal.
        cell: the notebook's cell that ran; None outside of a notebook.
    """

    name: str
    cell: int | None


def raise_unanswered(sync: ProcessSync) -> None:
    """End the program if it begins another fit although a signal has stopped the one before.

    `fit` returns after a signal, so that the program can save what it has. One that continues with
    the next of many fits would train for hours and call a model finished that is not: it gets the
    signal now, once, on all processes. The next cell of a notebook is typed by someone who knows.

    Args:
        sync: how several processes agree.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM, with 143.
    """
    if StopRequests._innermost is not None:
        return
    stop = StopRequests._unanswered
    if stop is not None and stop.cell != _find_cell():
        stop = None
    forget_stop_request()
    names = sync.all_gather("unanswered stop", None if stop is None else stop.name)
    for name in filter(None, names):
        _end_program(
            name,
            f"{name} stopped the fit before this one, and the program continued: after each fit, "
            f"look at result.stop_reason, or call fulgurite.forget_stop_request() to train "
            f"nevertheless",
        )


def forget_stop_request() -> None:
    """Forget that a signal has stopped a fit of this process, so that the next one trains.

    Without it the next fit raises `KeyboardInterrupt` after Ctrl-C and `SystemExit` after SIGTERM.
    In a notebook the next cell trains.
    """
    StopRequests._unanswered = None


def _end_program(name: str | None, message: str, cause: BaseException | None = None) -> NoReturn:
    """End the program as a signal would have ended it."""
    if name == signal.SIGINT.name:
        raise KeyboardInterrupt(message) from cause
    # The exit of a program prints no message of its own.
    warnings.warn(message, stacklevel=2)
    number = signal.Signals[name] if name is not None else 0
    raise SystemExit(128 + number) from cause


def _find_cell() -> int | None:
    """Return the number of the cell that a notebook runs; None outside of one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "execution_count", None)
