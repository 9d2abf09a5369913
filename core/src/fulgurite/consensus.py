"""The one seam for what a process decides from its own clock, signals or files."""

import signal
from collections.abc import Callable
from typing import Any, ClassVar

from fulgurite.fit.signals import STOP_SIGNALS


class ProcessSync:
    """How processes agree. This one is for a single process: all of its requests are granted.

    If one of several processes decided alone, it would enter a collective that the others do not. A
    plugin supplies a subclass through the hook `consensus`.

    Attributes:
        signals: the signals that the training loop takes as requests to stop; this object handles
            any others.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = STOP_SIGNALS

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        """The requests that all agree on at `step`: `task:NAME` for an action due by the clock,
        `stop:REASON`. Every process calls it equally often and at the same steps: at the end of
        each dispatch, before anything due there, and between the batches of an evaluation."""
        return requests

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        """What `make()` returns on the first process, a JSON value; the others wait and do not call
        it. If it raises, it raises everywhere. Every process calls this, in the same order, on the
        main thread."""
        return fn()

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """The JSON values of all processes, in their order; none continues before all have called
        it. It may be called on any thread; for each `name` every process calls it equally often."""
        return [value]


LOCAL = ProcessSync()
FIT = "fit"
"""What is gathered at the beginning of each fit goes by this name."""
