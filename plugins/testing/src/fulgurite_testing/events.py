"""A plugin that records the calls of its hooks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from typing import Any

import fulgurite as fg
from fulgurite.plugins import find_hookspecs, hookspecs

_NOT_OF_A_RUN = {"on_compile"}
"""Events outside of a fit as well, which are not recorded."""


@dataclass(frozen=True)
class Event:
    """A hook that was called.

    Attributes:
        hook: its name.
        step: of the run; None in an event that is not told of one.
        arguments: its other arguments by name.

    Example:

        from fulgurite_testing import Event

        Event("on_epoch_end", step=5, arguments={"epoch": 0})
    """

    hook: str
    step: int | None
    arguments: dict[str, Any]


def _record_every_event(cls: type["EventRecorder"]) -> type["EventRecorder"]:
    """Give a class an implementation of each event hook of a run, so that a new hook is recorded
    without a word here."""
    for name, hook in find_hookspecs(hookspecs).items():
        is_context = hook.returns is not None
        if hook.kind == "event" and not is_context and name not in _NOT_OF_A_RUN:
            spec = signature(getattr(hookspecs, name))
            setattr(cls, name, fg.hookimpl(_make_hook(name, spec)))
    return cls


def _make_hook(name: str, spec: Signature) -> Callable[..., None]:
    """Return a method that records the calls of a hook.

    Args:
        name: of the hook.
        spec: its signature, by which it is called.
    """

    def record_event(self: "EventRecorder", **arguments: Any) -> None:
        step = arguments.pop("step", None)
        run = arguments.pop("run", None)
        if run is not None:
            step = run.step
        self.events.append(Event(name, step, arguments))

    receiver = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    vars(record_event)["__signature__"] = spec.replace(
        parameters=[receiver, *spec.parameters.values()]
    )
    return record_event


@_record_every_event
@dataclass(frozen=True, eq=False)
class EventRecorder(fg.Plugin):
    """A plugin that keeps every event and every record.

    Attributes:
        events: in order.
        records: in order.

    Example:

        from fulgurite_testing import EventRecorder, TinyModel, tiny_data, tiny_engine

        recorder = EventRecorder()
        tiny_engine(recorder).fit(TinyModel, tiny_data())
        assert recorder.list_hooks()[-1] == "on_fit_end"
    """

    events: list[Event] = field(default_factory=list)
    records: list[fg.Record] = field(default_factory=list)
    plugin_name = "recorded_events"

    def list_exact_records(self) -> list[fg.Record]:
        """Return the records of the exact stream."""
        return [record for record in self.records if record.stream == "exact"]

    def list_hooks(self) -> list[str]:
        """Return the names of the hooks that were called, in order."""
        return [event.hook for event in self.events]

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Keep the record."""
        self.records.append(record)
