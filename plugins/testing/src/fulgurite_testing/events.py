"""A plugin that records the calls of its hooks."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg


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


@dataclass(frozen=True, eq=False)
class EventRecorder:
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
    def on_fit_start(self, run: fg.Run) -> None:
        """Record the event."""
        self._record_event("on_fit_start", run)

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run, epoch: int) -> None:
        """Record the event."""
        self._record_event("on_epoch_end", run, epoch=epoch)

    @fg.hookimpl
    def on_evaluate_end(self, run: fg.Run, name: str, metrics: dict[str, Any]) -> None:
        """Record the event."""
        self._record_event("on_evaluate_end", run, name=name, metrics=metrics)

    @fg.hookimpl
    def on_save(self, run: fg.Run, step: int) -> None:
        """Record the event."""
        self._record_event("on_save", run)

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Record the event."""
        self._record_event("on_restore", run)

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Record the event."""
        self._record_event("on_exception", run, exception=exception)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        """Record the event."""
        self._record_event("on_fit_end", run, result=result)

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        """Keep the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_media(self, record: fg.Record) -> None:
        """Keep the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_text(self, record: fg.Record) -> None:
        """Keep the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_config(self, record: fg.Record) -> None:
        """Keep the record."""
        self.records.append(record)

    def _record_event(self, hook: str, run: fg.Run, **arguments: Any) -> None:
        self.events.append(Event(hook, run.step, arguments))
