"""A plugin that records the calls of its hooks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from typing import Any

import fulgurite as fg
from fulgurite.plugins import hookspecs

_NOT_OF_A_RUN = ("on_compile",)
"""Events outside of a fit as well, which are not recorded."""


@dataclass(frozen=True)
class Event:
    """A hook that was called.

    Attributes:
        hook: its name.
        step: of the run.
        arguments: its other arguments by name.

    Example:

        from fulgurite_testing import Event

        Event("on_epoch_end", step=5, arguments={"epoch": 0})
    """

    hook: str
    step: int
    arguments: dict[str, Any]


def _record_every_event(cls: type["EventRecorder"]) -> type["EventRecorder"]:
    """Give a class an implementation of each event hook of a run, so that a new hook is recorded
    without a word here."""
    for name, spec in vars(hookspecs).items():
        is_event = name.startswith("on_") and name not in _NOT_OF_A_RUN
        if is_event:
            setattr(cls, name, fg.hookimpl(_make_hook(name, signature(spec))))
    return cls


def _make_hook(name: str, spec: Signature) -> Callable[..., None]:
    """Return a method that records the calls of a hook.

    Args:
        name: of the hook.
        spec: its signature, by which it is called.
    """

    def record_event(self: "EventRecorder", **arguments: Any) -> None:
        run = arguments.pop("run")
        arguments.pop("step", None)  # that of the run
        self.events.append(Event(name, run.step, arguments))

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
