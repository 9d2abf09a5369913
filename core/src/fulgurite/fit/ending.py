"""The end of a fit: what was trained outlasts what fails there, and errors say whose they are."""

from contextlib import AbstractContextManager
from typing import Any

from fulgurite.errors import SaveError
from fulgurite.fit.loop import Loop
from fulgurite.plugins.manager import HookImpl, plugin_error_context
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


class PluginContext(AbstractContextManager[None, bool | None]):
    """A context that a plugin returned: an error of its end names the plugin.

    Args:
        hook: which returned it.
        context: the context.
        step: the number of completed updates.
    """

    def __init__(
        self, hook: HookImpl, context: AbstractContextManager[Any], step: int | None = None
    ) -> None:
        self._hook = hook
        self._context = context
        self._step = step

    def __enter__(self) -> None:
        with self._name_plugin():
            self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        try:
            return self._context.__exit__(kind, error, traceback)
        except BaseException as further:
            # What the block raised is not the plugin's.
            if further is not error:
                with self._name_plugin():
                    raise
            raise

    def _name_plugin(self) -> AbstractContextManager[None]:
        return plugin_error_context(self._hook.plugin, f"hook {self._hook.hook}", self._step)
