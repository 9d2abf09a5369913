"""The implementation of one hook by one plugin: the one place where hooks of plugins run.

Here an exception gets a note with plugin, hook and step, an answer is checked, and the time is
booked to `PLUGIN.HOOK`, unless the hook is traced or returns a context. `callers` combines the
answers of several.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from fulgurite._src.plugins.answers import check_answer, note_answer
from fulgurite._src.plugins.markers import HookMetadata
from fulgurite._src.plugins.plugin import name_context
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite.errors import NonFiniteError, PluginError, exit_as_error

Accept = Callable[[RegisteredPlugin, Any], Any]
"""`accept(plugin, answer)` checks or converts an answer; what it raises names the plugin too."""
TimeContext = Callable[[str], AbstractContextManager[Any]]
"""Returns a context whose time is booked to a name."""


@dataclass(frozen=True)
class HookImpl:
    """One plugin's implementation of one hook.

    Attributes:
        plugin: whose it is.
        hook: the name of the hook.
        function: the bound method.
        argnames: the arguments that it takes, of those that the hook gives.
        metadata: what is known of the hook.
        time: books the time of a call.
    """

    plugin: RegisteredPlugin
    hook: str
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    metadata: HookMetadata
    time: TimeContext

    def __call__(self, step: int | None = None, /, **arguments: Any) -> Any:
        """Call it with those of the arguments that it takes; `step` is for notes on errors."""
        return self.call(step, arguments)

    def call(
        self, step: int | None, arguments: Mapping[str, Any], accept: Accept | None = None
    ) -> Any:
        """Call it with those of the arguments that it takes.

        Args:
            step: the number of completed updates, for notes on errors.
            arguments: all that the hook gives.
            accept: checks or converts the answer.
        """
        with self.time(f"{self.plugin.name}.{self.hook}"), self._name_plugin(step):
            answer = self.function(**{name: arguments[name] for name in self.argnames})
            may_return_tracers = self.metadata.kind in ("build", "traced")
            check_answer(
                self.hook, self.metadata.returns, answer, may_return_tracers=may_return_tracers
            )
            note_answer(f"plugin {self.plugin.name!r}, hook {self.hook}", answer)
            return answer if accept is None else accept(self.plugin, answer)

    def enter(self, stack: ExitStack, step: int | None, arguments: Mapping[str, Any]) -> None:
        """Call it, and enter the context manager that it returns.

        Args:
            stack: leaves the context; an error of its end names the plugin.
            step: the number of completed updates, for notes on errors.
            arguments: all that the hook gives.
        """
        context = self.call(step, arguments)
        if context is not None:
            stack.enter_context(_PluginContext(context, lambda: self._name_plugin(step)))

    def _name_plugin(self, step: int | None) -> AbstractContextManager[None]:
        return plugin_error_context(self.plugin, f"hook {self.hook}", step)


@contextmanager
def plugin_error_context(plugin: RegisteredPlugin, what: str, step: int | None) -> Iterator[None]:
    """Add to an exception which plugin raised it, and have the plugin know its name. A `sys.exit`
    in it is an error. A `NonFiniteError` passes as it is: the step is at fault, and not the first
    plugin that reads its state.

    Args:
        plugin: who is called.
        what: the hook or action.
        step: the number of completed updates, where there is one.
    """
    where = "" if step is None else f", step {step}"
    with name_context(plugin.plugin, plugin.name):
        try:
            with exit_as_error(PluginError, f"plugin {plugin.name!r}"):
                yield
        except NonFiniteError:
            raise
        except BaseException as error:
            error.add_note(f"plugin {plugin.name!r} ({plugin.distribution}), {what}{where}")
            raise


class _PluginContext(AbstractContextManager[None, bool | None]):
    """A context that a plugin returned: an error of its end names the plugin.

    Args:
        context: the context.
        name_plugin: returns a context whose errors name the plugin.
    """

    def __init__(
        self,
        context: AbstractContextManager[Any],
        name_plugin: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._context = context
        self._name_plugin = name_plugin

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
