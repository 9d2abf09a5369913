"""The one seam for what a process decides from its own clock, signals or files."""


class Consensus:
    """How processes agree. This one is for a single process: everything it wishes is agreed.

    With several processes, one that decided alone would enter a collective that the others do not. A plugin answers the
    hook `consensus` with a subclass.
    """

    def agree(self, step: int, wishes: frozenset[str]) -> frozenset[str]:
        """The wishes that hold for all processes at `step`: `task:NAME` for an action due by the clock, `stop:REASON`.

        Called by every process at the same steps: at each end of a dispatch, unless `next_meeting` says less often.
        """
        return wishes

    def next_meeting(self, step: int) -> int | None:
        """The step at which `agree` is called next, None for every end of a dispatch. Dispatches are cut there."""
        return None


LOCAL = Consensus()
