"""The one seam for what a process decides from its own clock, signals or files."""

import signal
from collections.abc import Callable
from typing import Any, ClassVar

from fulgurite.signals import STOP_SIGNALS


class Consensus:
    """How processes agree. This one is for a single process: everything it wishes is agreed.

    With several processes, one that decided alone would enter a collective that the others do not. A plugin answers the
    hook `consensus` with a subclass.

    Attributes:
        signals: those that the training loop takes as wishes to stop; others are the business of this object.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = STOP_SIGNALS

    def agree(self, step: int, wishes: frozenset[str]) -> frozenset[str]:
        """The wishes that hold for all processes at `step`: `task:NAME` for an action due by the clock, `stop:REASON`.
        Called equally often by every process, at the same steps: at each end of a dispatch, before what is due there,
        and between the batches of an evaluation."""
        return wishes

    def decide(self, make: Callable[[], Any]) -> Any:
        """What `make()` gives on the first process, a JSON value; the others do not call it and wait. If it raises,
        it raises everywhere. Called by every process, in the same order, on the main thread."""
        return make()

    def gather(self, name: str, value: Any) -> list[Any]:
        """The JSON values of all processes, in their order; nobody goes on before all have come here. May be called on
        any thread, by every process equally often for each `name`."""
        return [value]


LOCAL = Consensus()
FIT = "fit"
"""What is gathered at the beginning of each fit goes by this name."""
