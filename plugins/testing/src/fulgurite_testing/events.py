"""What a run told its plugins."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg


@dataclass(frozen=True)
class Event:
    """A hook that was called.

    Example:
        from fulgurite_testing import Events, TinyModel, tiny_data, tiny_engine

        recorded = Events()
        tiny_engine(recorded).fit(TinyModel, tiny_data())
        ends = [event.step for event in recorded.events if event.hook == "on_epoch_end"]

    Attributes:
        hook: its name.
        step: of the run.
        arguments: the others that it was called with.
    """

    hook: str
    step: int
    arguments: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Events:
    """A plugin that keeps every event and every record.

    Example:
        from fulgurite_testing import Events, tiny_engine

        recorded = Events()
        engine = tiny_engine(recorded)
        recorded.hooks()  # [], until the engine fits
    """

    events: list[Event] = field(default_factory=list)
    records: list[fg.Record] = field(default_factory=list)
    plugin_name = "recorded_events"

    def exact(self) -> list[fg.Record]:
        """The records of the exact stream."""
        return [record for record in self.records if record.stream == "exact"]

    def hooks(self) -> list[str]:
        """The names of the events, in order."""
        return [event.hook for event in self.events]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Keeps the event."""
        self._note("on_fit_start", run)

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run, epoch: int) -> None:
        """Keeps the event."""
        self._note("on_epoch_end", run, epoch=epoch)

    @fg.hookimpl
    def on_evaluate_end(self, run: fg.Run, name: str, metrics: dict[str, Any]) -> None:
        """Keeps the event."""
        self._note("on_evaluate_end", run, name=name, metrics=metrics)

    @fg.hookimpl
    def on_save(self, run: fg.Run, step: int) -> None:
        """Keeps the event."""
        self._note("on_save", run)

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Keeps the event."""
        self._note("on_restore", run)

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Keeps the event."""
        self._note("on_exception", run, exception=exception)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        """Keeps the event."""
        self._note("on_fit_end", run, result=result)

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        """Keeps the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_media(self, record: fg.Record) -> None:
        """Keeps the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_text(self, record: fg.Record) -> None:
        """Keeps the record."""
        self.records.append(record)

    @fg.hookimpl
    def log_config(self, record: fg.Record) -> None:
        """Keeps the record."""
        self.records.append(record)

    def _note(self, hook: str, run: fg.Run, **arguments: Any) -> None:
        self.events.append(Event(hook, run.step, arguments))
