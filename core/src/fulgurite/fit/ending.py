"""The end of a fit: what was trained outlasts what fails there, and errors say whose they are."""

from contextlib import AbstractContextManager

from fulgurite.errors import SaveError
from fulgurite.fit.loop import Loop
from fulgurite.redact import format_error


class ResultKeeper(AbstractContextManager["ResultKeeper", None]):
    """Raises `SaveError`, with the result, for an error that leaves the block after the last step.

    Attributes:
        loop: that of the fit in the block, once there is one.
    """

    def __init__(self) -> None:
        self.loop: Loop | None = None

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        result = None
        # Nobody wants what a trial has trained.
        if self.loop is not None and self.loop.engine.fast_dev_run is None:
            result = self.loop.result
        if result is None or not isinstance(error, Exception) or isinstance(error, SaveError):
            return
        notes = "; ".join(getattr(error, "__notes__", []))
        raise SaveError(
            f"training has ended at step {int(result.state.step)}, and what comes after the last "
            f"step failed: {format_error(error)}{notes and f' ({notes})'}. What was trained is in "
            "this error's `result`",
            result,
        ) from error
