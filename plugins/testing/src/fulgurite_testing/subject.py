"""The plugin that is checked, and the runs of it that several checks look at."""

import copy
import functools
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

from fulgurite_testing.events import Events
from fulgurite_testing.memory import Memory
from fulgurite_testing.tiny import STEPS, TinyModel, tiny_data, tiny_engine
from fulgurite_testing.watched import watch

CLOSING = ("close_logger", "on_fit_end", "on_exception")

CHANGES_BY_NATURE = {
    "after_update",
    "gradient_transform",
    "loss_terms",
    "configure_optimizers",
    "sharding_strategy",
    "transform_batch",
    "make_update_rule",
    "wrap_update_rule",
}
"""Hooks that are there to change the numbers of a run."""


HALF = STEPS // 2

HOST = ("event", "logger", "persistence")
"""Kinds of hooks that are called on the host."""


class Broken(AssertionError):
    """What one check has found."""


@dataclass(frozen=True)
class Ran:
    """A fit that came to its end.

    Attributes:
        result: what it returned.
        events: what its plugins were told.
        plugin: the instance that took part, None where none did.
        run: the run's directory.
        memory: what was saved, unless the plugin itself is the checkpointer.
    """

    result: fg.FitResult
    events: Events
    plugin: Any
    run: Path
    memory: Memory


@dataclass(eq=False)
class Subject:
    """What is checked, and where it trains.

    Attributes:
        given: a callable that makes the plugin, or a plugin, of which each run gets a copy.
        beside: makes the other plugins that it needs.
        model, data: what is trained, the latter made anew for each run.
        bad_arguments: keyword arguments that its class must refuse.
        timeout: seconds that it may take to close.
        folder: for run directories.
        content: what counts of a file that it writes.
    """

    given: Any
    beside: Callable[[], Sequence[Any]]
    model: Any
    data: Callable[[], Any]
    bad_arguments: Sequence[dict[str, Any]]
    timeout: float
    folder: Path
    content: Callable[[Path], Any] = Path.read_bytes
    _runs: int = field(default=0, init=False)

    def make(self) -> Any:
        """A new plugin."""
        if callable(self.given):
            return self.given()
        try:
            return copy.deepcopy(self.given)
        except TypeError as error:
            raise Broken(
                f"{self.given!r} cannot be copied: give its class, or a function that makes one"
            ) from error

    @functools.cached_property
    def hooks(self) -> set[str]:
        """The names of the hooks that it implements."""
        plugin = self.make()
        if isinstance(plugin, str | dict):
            raise Broken(
                f"{plugin!r} is a name: give the class of the plugin, or a function that makes one"
            )
        engine = tiny_engine(plugin, *self.beside())
        registered = next(one for one in engine.plugins.plugins.values() if one.plugin is plugin)
        return engine.plugins.get_hooks_of(registered)

    @functools.cached_property
    def traced(self) -> bool:
        """Whether anything of it is part of the compiled step."""
        return not self.hooks <= {name for name, kind in _kinds().items() if kind in HOST} | {
            "register_actions"
        }

    @property
    def changes_results(self) -> bool:
        """Whether it says that it changes the numbers of a run."""
        return bool(self.hooks & CHANGES_BY_NATURE) or getattr(
            self.make(), "changes_results", False
        )

    @functools.cached_property
    def ran(self) -> Ran:
        """A fit of 8 steps with it."""
        return self.fit(self.make())

    @functools.cached_property
    def again(self) -> "Again":
        """The same fit once more, by another instance, watched as it closes."""
        late: list[str] = []

        def around(name: str, call: Callable[[], Any]) -> Any:
            task = _Limited(call)
            if not task.done_within(self.timeout):
                late.append(name)
            return task.answer()

        before = set(threading.enumerate())
        ran = self.fit(watch(self.make(), CLOSING, around))
        left = [one for one in threading.enumerate() if one not in before and not one.daemon]
        for one in left:
            one.join(self.timeout)
        return Again(ran, late, [one.name for one in left if one.is_alive()])

    @functools.cached_property
    def without(self) -> Ran:
        """The same fit without it."""
        alone = self.beside is list and (self.model, self.data) == (TinyModel, tiny_data)
        return _tiny_alone() if alone else self.fit(None)

    def directory(self) -> Path:
        """A run directory of its own."""
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def fit(
        self,
        plugin: Any,
        *,
        run: Path | None = None,
        memory: Memory | None = None,
        resume: Any = None,
        others: Sequence[Any] = (),
        **settings: Any,
    ) -> Ran:
        """Trains with a plugin, or without any, in `run` or a directory of its own. It is saved
        after half of the steps."""
        run = self.directory() if run is None else run
        events, memory = Events(), memory or Memory()
        keeps = not self.hooks & {"save_checkpoint", "restore_checkpoint"}
        companions = [*self.beside(), *others, Saving(HALF), events, *([memory] if keeps else [])]
        engine = tiny_engine(
            *([] if plugin is None else [plugin]), *companions, run_dir=run, **settings
        )
        with warnings.catch_warnings():
            # A logger that fails warns; `result.failures` says so as well, and that is looked at.
            warnings.filterwarnings("ignore", category=UserWarning)
            result = engine.fit(self.model, self.data(), resume=resume)
        return Ran(result, events, plugin, run, memory)


@dataclass(frozen=True)
class Again:
    """A fit that was watched: hooks that did not come back in time, and threads that were left."""

    ran: Ran
    late: list[str]
    left: list[str]


class _Limited:
    """A call on a thread of its own, which is given up after a while."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def done_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def answer(self) -> Any:
        """What the call gave, or None if it was given up; raises what it raised."""
        return self._future.result() if self._future.done() else None

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)


@functools.cache
def _kinds() -> dict[str, str]:
    hooks = tiny_engine().plugins.hooks
    return {name: metadata.kind for name, metadata in hooks.items()}


@functools.cache
def _tiny_alone() -> Ran:
    with tempfile.TemporaryDirectory(prefix="fulgurite-testing-") as folder:
        subject = Subject(Saving(HALF), list, TinyModel, tiny_data, (), 10.0, Path(folder))
        return subject.fit(None)


@dataclass(frozen=True)
class Saving:
    """Saves at a step, once everything else there is done."""

    instance: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """One save."""
        return [
            fg.ScheduledAction("save", fg.At(self.instance), lambda run: run.save(), stage="save")
        ]


def said(error: BaseException) -> str:
    """An exception in one line, with its notes."""
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    kind = "" if isinstance(error, FulguriteError | Broken) else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"
