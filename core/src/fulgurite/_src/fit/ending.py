"""The end of a fit: what was trained outlasts what fails there, and errors say whose they are."""

from contextlib import AbstractContextManager

from fulgurite._src.fit.loop import Loop
from fulgurite._src.redact import format_error
from fulgurite.errors import PluginError, SaveError


class ResultKeeper(AbstractContextManager["ResultKeeper", None]):
    """Raises `SaveError`, with the result, for an error that leaves the block after the last step.

    The `SaveError` of a fit within an action or hook holds what that one has trained: it does not
    leave the block as if it were this fit's.

    Attributes:
        loop: that of the fit in the block, once there is one.
    """

    def __init__(self) -> None:
        self.loop: Loop | None = None

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or self._has_own_result(error):
            return
        result = None
        # Nobody wants what a trial has trained.
        if self.loop is not None and self.loop.fit.engine.fast_dev_run is None:
            result = self.loop.fit.result
        notes = "; ".join(getattr(error, "__notes__", []))
        reason = f"{format_error(error)}{notes and f' ({notes})'}"
        if result is not None:
            raise SaveError(
                f"training has ended at step {int(result.state.step)}, and what comes after the "
                f"last step failed: {reason}. What was trained is in this error's `result`",
                result,
            ) from error
        if isinstance(error, SaveError):
            raise PluginError(
                f"a fit within this one failed after its last step, and this one with it: {reason}."
                " That `result` is the one of this error's `__cause__`"
            ) from error

    def _has_own_result(self, error: Exception) -> bool:
        """Return whether an error holds what the fit in the block has trained."""
        if not isinstance(error, SaveError) or self.loop is None:
            return False
        return error.result.history is self.loop.fit.records.history
