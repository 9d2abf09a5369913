"""The plugin that is checked, and its runs that several checks need."""

import copy
import functools
import inspect
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import FulguriteError
from fulgurite.plugins import HIDDEN_FRAMES_NOTE, get_options

from fulgurite_testing.events import EventRecorder
from fulgurite_testing.memory import InMemoryCheckpointer
from fulgurite_testing.tiny import STEPS, TinyModel, tiny_data, tiny_engine
from fulgurite_testing.watch import watch

CLOSING_HOOKS = ("close_logger", "on_fit_end", "on_exception")

CHANGES_BY_NATURE = {
    "after_update",
    "gradient_transform",
    "loss_terms",
    "configure_optimizers",
    "sharding_strategy",
    "transform_batch",
    "transform_module",
    "make_update_rule",
    "wrap_update_rule",
}
"""Hooks whose purpose is to change the numbers of a run."""

HALF = STEPS // 2

HOST_KINDS = ("event", "logger", "persistence")
"""Kinds of hooks that are called on the host."""


class CheckError(AssertionError):
    """A promise that a plugin breaks."""


@dataclass(frozen=True)
class FitRecord:
    """A fit that is over.

    Attributes:
        result: its result.
        events: the recorder that took part.
        plugin: the instance that took part, None for a fit without the plugin.
        run_dir: the run directory.
        memory: the checkpointer, unless the plugin itself is one.
    """

    result: fg.FitResult
    events: EventRecorder
    plugin: Any
    run_dir: Path
    memory: InMemoryCheckpointer


@dataclass(eq=False)
class PluginUnderTest:
    """The plugin that is checked, and what it is trained with.

    Attributes:
        plugin: a callable that builds the plugin, or a plugin, of which each run gets a copy.
        other_plugins: builds the other plugins that it needs.
        model: the model, or a function of a key that builds it.
        data: builds the data of each run.
        bad_arguments: keyword arguments that its class must reject.
        timeout: seconds that it may take to close.
        folder: for run directories.
        content: returns what to compare of a file that it writes.
    """

    plugin: Any
    other_plugins: Callable[[], Sequence[Any]]
    model: Any
    data: Callable[[], Any]
    bad_arguments: Sequence[dict[str, Any]]
    timeout: float
    folder: Path
    content: Callable[[Path], Any] = Path.read_bytes
    _runs: int = field(default=0, init=False)

    def make(self) -> Any:
        """Return a new plugin."""
        if callable(self.plugin) and not _has_hooks(self.plugin):
            return self.plugin()
        try:
            return copy.deepcopy(self.plugin)
        except TypeError as error:
            raise CheckError(
                f"{self.plugin!r} cannot be copied: pass its class, or a function that builds it"
            ) from error

    @property
    def constructor(self) -> Callable[..., Any]:
        """Return what takes keyword arguments of its class, after those that are fixed by a
        `functools.partial`."""
        cls = type(self.make())
        if isinstance(self.plugin, functools.partial) and self.plugin.func is cls:
            return self.plugin
        return cls

    @functools.cached_property
    def hooks(self) -> set[str]:
        """Return the names of the hooks that it implements."""
        plugin = self.make()
        if isinstance(plugin, str | dict):
            raise CheckError(
                f"{plugin!r} is a name: pass the class of the plugin, or a function that builds it"
            )
        engine = tiny_engine(plugin, *self.other_plugins())
        (registered,) = (
            entry for entry in engine.plugins.plugins.values() if entry.plugin is plugin
        )
        return engine.plugins.get_hook_names(registered)

    @functools.cached_property
    def is_traced(self) -> bool:
        """Return whether any of its hooks is part of the compiled step."""
        host_hooks = {name for name, kind in _get_hook_kinds().items() if kind in HOST_KINDS}
        return not self.hooks <= host_hooks | {"register_actions"}

    @property
    def changes_results(self) -> bool:
        """Return whether it says that it changes the numbers of a run."""
        is_by_nature = bool(self.hooks & CHANGES_BY_NATURE)
        return is_by_nature or get_options(self.make()).changes_results

    @functools.cached_property
    def first_fit(self) -> FitRecord:
        """Return a fit of 8 steps with it."""
        return self.fit(self.make())

    @functools.cached_property
    def watched_fit(self) -> "WatchedFit":
        """Return the same fit once more, with another instance, watched as it closes."""
        late_hooks: list[str] = []

        def call_with_timeout(name: str, call: Callable[[], Any]) -> Any:
            task = _CallOnThread(call)
            if not task.wait(self.timeout):
                late_hooks.append(name)
            return task.get_result()

        before = set(threading.enumerate())
        fit_record = self.fit(watch(self.make(), CLOSING_HOOKS, call_with_timeout))
        threads = [
            thread for thread in threading.enumerate() if thread not in before and not thread.daemon
        ]
        for thread in threads:
            thread.join(self.timeout)
        running = [thread.name for thread in threads if thread.is_alive()]
        return WatchedFit(fit_record, late_hooks, running)

    @functools.cached_property
    def fit_without_plugin(self) -> FitRecord:
        """Return the same fit without it."""
        is_default = self.other_plugins is list and (self.model, self.data) == (
            TinyModel,
            tiny_data,
        )
        return _fit_tiny_model() if is_default else self.fit(None)

    def create_run_dir(self) -> Path:
        """Return a new path for a run directory."""
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def fit(
        self,
        plugin: Any,
        *,
        run_dir: Path | None = None,
        memory: InMemoryCheckpointer | None = None,
        resume: Any = None,
        others: Sequence[Any] = (),
        **settings: Any,
    ) -> FitRecord:
        """Return a fit that is saved after half of the steps.

        Args:
            plugin: the instance that takes part; None for a fit without the plugin.
            run_dir: the run directory; a new one by default.
            memory: the checkpointer; a new one by default.
            resume: as in `engine.fit`.
            others: further plugins.
            settings: of the engine.
        """
        if run_dir is None:
            run_dir = self.create_run_dir()
        events = EventRecorder()
        memory = memory or InMemoryCheckpointer()
        plugins = [] if plugin is None else [plugin]
        plugins += [*self.other_plugins(), *others, SaveAt(HALF), events]
        if not self.hooks & {"save_checkpoint", "restore_checkpoint"}:
            plugins.append(memory)
        engine = tiny_engine(*plugins, run_dir=run_dir, **settings)
        with warnings.catch_warnings():
            # A logger that fails warns, and is in `result.failures`, which the checks read.
            warnings.filterwarnings("ignore", category=UserWarning)
            result = engine.fit(self.model, self.data(), resume=resume)
        return FitRecord(result, events, plugin, run_dir, memory)


@dataclass(frozen=True)
class WatchedFit:
    """A fit that was watched as it closed.

    Attributes:
        fit_record: the fit.
        late_hooks: the hooks that did not return in time.
        running_threads: the threads that were left.
    """

    fit_record: FitRecord
    late_hooks: list[str]
    running_threads: list[str]


class _CallOnThread:
    """A call on its own thread, which is abandoned after a timeout."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the call, and return whether it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def get_result(self) -> Any:
        """Return the result of the call, or None if it is not done; raise what it raised."""
        return self._future.result() if self._future.done() else None

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)


def _has_hooks(value: Any) -> bool:
    """Return whether a value is an instance of a class of plugins, which may be callable too."""
    cls = type(value)
    return any(
        hasattr(inspect.getattr_static(cls, name, None), "fulgurite_impl") for name in dir(cls)
    )


@functools.cache
def _get_hook_kinds() -> dict[str, str]:
    hooks = tiny_engine().plugins.hooks
    return {name: hook.metadata.kind for name, hook in hooks.items()}


@functools.cache
def _fit_tiny_model() -> FitRecord:
    with tempfile.TemporaryDirectory(prefix="fulgurite-testing-") as folder:
        subject = PluginUnderTest(SaveAt(HALF), list, TinyModel, tiny_data, (), 10.0, Path(folder))
        return subject.fit(None)


@dataclass(frozen=True)
class SaveAt:
    """Saves at a step, after everything else there.

    Attributes:
        instance: the step.
    """

    instance: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Save at that step."""
        return [
            fg.ScheduledAction("save", fg.At(self.instance), lambda run: run.save(), stage="save")
        ]


def format_error(error: BaseException) -> str:
    """Return an exception in one line, with its notes."""
    notes = [note for note in getattr(error, "__notes__", []) if note != HIDDEN_FRAMES_NOTE]
    where = "".join(f" ({note})" for note in notes)
    kind = "" if isinstance(error, FulguriteError | CheckError) else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"
