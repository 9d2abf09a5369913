"""What may never come back, such as a call of a disk that hangs, on a thread that can be left."""

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from fulgurite.plugins import Wait

T = TypeVar("T")


def start_thread(name: str, function: Callable[[], T]) -> "Future[T]":
    """Call a function on a thread that does not keep the process from its end, as one of a
    `ThreadPoolExecutor` does that hangs.

    Where the system starts no further thread, it is called at once: whoever started it waits.

    Args:
        name: of the thread.
        function: what is called.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return future


def call_abandonable(what: str, function: Callable[[], T]) -> T:
    """Return what a function returns, or raise what it raises. The main thread calls it on another
    one, because a system call of a disk that hangs cannot be left, but a wait for it can.

    Args:
        what: is waited for, for messages.
        function: what is called.

    Raises:
        WaitAbandoned: training is to stop, and the function has not returned in time.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    future = start_thread("fulgurite disk", function)
    with Wait(what):
        futures.wait([future])
    return future.result()
