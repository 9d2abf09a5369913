"""Watches what XLA compiles, and when."""

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import fulgurite as fg
from fulgurite.plugins import Wait
from models import numbers

DATA = numbers([0], [1], [2], [3])


class Compiler:
    """Does what a test wants before XLA compiles a program.

    Attributes:
        act: called on the thread that compiles.
        events: the fit's beginning and what was compiled, in order.
    """

    def __init__(self) -> None:
        self.act: Callable[[], Any] = lambda: None
        self.events: list[str] = []
        self.released = threading.Event()

    @fg.hookimpl
    def on_fit_start(self) -> None:
        self.events.append("fit")

    def fail(self) -> None:
        raise RuntimeError("XLA ran out of registers")

    def block(self) -> None:
        assert self.released.wait(60)

    def wait_for(self, number: int) -> None:
        """Wait until XLA has begun with that many programs."""
        deadline = monotonic() + 60
        while self.events.count("compile") < number:
            assert monotonic() < deadline
            sleep(0.01)

    def release_once_waited_for(self) -> None:
        wait_for_waiter()
        self.released.set()


def wait_for_waiter() -> None:
    """Wait until the main thread waits for the compiler."""
    deadline = monotonic() + 60
    while Wait.current is None or Wait.current.what != "the compiler":
        assert monotonic() < deadline
        sleep(0.01)


def make_engine(*plugins: Any, **options: Any) -> fg.Engine:
    return fg.Engine(**{"steps": 8, "plugins": plugins, "autoload": False, **options})
