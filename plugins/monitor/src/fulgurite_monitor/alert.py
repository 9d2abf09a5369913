"""Tell someone when a logged value crosses a limit."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, check_callable, did_you_mean
from fulgurite.plugins import hide_constructor_frames

from fulgurite_monitor.alert_actions import AlertEvent
from fulgurite_monitor.conditions import Comparison

CLOSE_SECONDS = 15.0
"""How long the end of a fit waits for what alerts do."""


@dataclass
class _Watched:
    """What an alert knows of one fit.

    Attributes:
        run: what messages go to; None before the fit starts.
        values: the newest, as `SOURCE/NAME`.
        others: the names in records that did not have the value, by source.
        is_fulfilled: whether the condition held with the newest record.
        doer: the thread that does what the alert does.
    """

    run: fg.Run | None = None
    values: dict[str, float] = field(default_factory=dict)
    others: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    is_fulfilled: bool = False
    doer: "_Doer | None" = None


@hide_constructor_frames
@dataclass(eq=False)
class Alert(fg.Plugin):
    """Tell someone when a condition on logged values comes to hold: once for each time it does in
    an attempt. A run that is resumed tells again what still holds.

    Every record of numbers is looked at, exact ones and telemetry, when loggers get it. An alert is
    a message of the run, and calls what is in `do` on a thread of its own: a webhook that does not
    answer delays no step. What fails is in `result.failures`, and training continues; so is, at the
    end, a condition on a value that nothing has logged.

    Example:
        from fulgurite_monitor import Alert, NotifyCommand

        slow = Alert("throughput/examples_per_second < 100", do=[NotifyCommand(["wall"])])
        odd = Alert(lambda values: values.get("train/loss", 0) > values.get("test/loss", 1e9))
        engine = fg.Engine(steps=100, plugins=[slow, odd])

    Attributes:
        when: `SOURCE/NAME`, a comparison and a number, as `train/loss > 10`; or a function that
            gets the newest values by such names and returns whether to alert.
        do: functions of an `AlertEvent`: `NotifyCommand`, `Webhook`, or your own.
        instance: tells several alerts apart; by default they are numbered.
    """

    when: str | Callable[[Mapping[str, float]], bool]
    do: Sequence[Callable[[AlertEvent], object]] = ()
    instance: str | None = None
    _watched = fg.PerFit(_Watched)

    def __post_init__(self) -> None:
        if isinstance(self.do, str) or not isinstance(self.do, Sequence):
            raise ConfigurationError(
                f"Alert: do is {self.do!r}; give a list of functions, such as [Webhook(url)]"
            )
        for action in self.do:
            check_callable(action, "Alert: an item of do")
        if isinstance(self.when, str):
            self._condition: Callable[[Mapping[str, float]], bool] = Comparison(self.when)
            self._text = self.when
        else:
            check_callable(self.when, "Alert: when")
            self._condition = self.when
            self._text = getattr(self.when, "__name__", type(self.when).__name__)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Begin to watch. Of several processes the first does, which has the records."""
        self._watched.run = run
        if self.do and jax.process_index() == 0:
            self._watched.doer = _Doer(self.do)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Look at the numbers of a record, and report what failed since the last one."""
        watched = self._watched
        if record.kind != "scalars" or watched.run is None:
            return
        # Not in an action, which costs a log step three times as much.
        if watched.doer is not None:
            self._report(watched.run, watched.doer)
        if isinstance(self._condition, Comparison):
            numbers = self._condition.select(record)
        else:
            numbers = {f"{record.source}/{name}": value for name, value in record.values.items()}
        numbers = {
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, bool | int | float)
        }
        if not numbers:
            watched.others[record.source].update(record.values)
            return
        watched.values |= numbers
        was_fulfilled = watched.is_fulfilled
        watched.is_fulfilled = bool(self._condition(watched.values))
        if watched.is_fulfilled and not was_fulfilled:
            self._alert(watched, record.step)

    @fg.hookimpl
    def close_logger(self) -> None:
        """Wait until everything is done, in bounded time."""
        watched = self._watched
        watched.run = None
        if watched.doer is not None:
            watched.doer.close(CLOSE_SECONDS)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """Report what failed since the last record, or was not done, and a condition on a value
        that there is none of."""
        self._report_missing_value(run)
        doer = self._watched.doer
        if doer is None:
            return
        self._report(run, doer)
        if doer.is_busy:
            run.report_failure(
                f"{self.registered_name}.do",
                f"what alerts do was not done {CLOSE_SECONDS:g} s after the end of training",
                TimeoutError("it takes too long"),
            )

    def _report(self, run: fg.Run, doer: "_Doer") -> None:
        for failure in doer.take_failures():
            # Not the plugin's own name: a logger that has failed gets no more records.
            run.report_failure(
                f"{self.registered_name}.{failure.name}", str(failure), failure.error
            )

    def _report_missing_value(self, run: fg.Run) -> None:
        watched = self._watched
        if not isinstance(self._condition, Comparison) or watched.values:
            return
        name = self._condition.name
        plugins = run.engine.plugins.plugins.values()
        may_come_later = {*run.engine.evaluations}.union(*(plugin.aliases for plugin in plugins))
        source = name.partition("/")[0]
        if not watched.others or (source in may_come_later and source not in watched.others):
            return
        known = {f"{source}/{other}" for source, names in watched.others.items() for other in names}
        reason = f"nothing has logged {name}. {did_you_mean(name, known)}"
        if name in known:
            reason = f"{name} is an array, and an alert looks at single numbers"
        run.report_failure(
            f"{self.registered_name}.when",
            f"the condition {self._text!r} was never looked at",
            ConfigurationError(reason),
        )

    def _alert(self, watched: _Watched, step: int) -> None:
        message = f"alert at step {step:,}: {self._text}"
        if isinstance(self._condition, Comparison):
            message += f" ({self._condition.name} is {watched.values[self._condition.name]:.6g})"
        assert watched.run is not None
        watched.run.notify(self.registered_name, message)
        if watched.doer is not None:
            watched.doer.put(AlertEvent(self._text, step, message))


class _Failure(NamedTuple):
    """What an alert could not do.

    Attributes:
        name: of the function.
        step: of the alert.
        error: why.
    """

    name: str
    step: int
    error: Exception

    def __str__(self) -> str:
        return f"{self.name} failed for the alert at step {self.step:,}"


class _Doer:
    """Calls functions of events on a thread, one event after the other.

    Args:
        actions: the functions.
    """

    def __init__(self, actions: Sequence[Callable[[AlertEvent], object]]) -> None:
        self._actions = actions
        self._events: queue.SimpleQueue[AlertEvent | None] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[_Failure] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fulgurite alert", daemon=True)
        self._thread.start()

    def put(self, event: AlertEvent) -> None:
        """Have the functions called with an event, soon."""
        self._events.put(event)

    def take_failures(self) -> list[_Failure]:
        """Return what failed since the last call."""
        failures = []
        while not self._failures.empty():
            failures.append(self._failures.get())
        return failures

    def close(self, seconds: float) -> None:
        """Wait at most some seconds until everything is done; what is not is left."""
        self._events.put(None)
        self._thread.join(seconds)

    @property
    def is_busy(self) -> bool:
        """Whether something is not done yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            for action in self._actions:
                self._call(action, event)

    def _call(self, action: Callable[[AlertEvent], object], event: AlertEvent) -> None:
        try:
            action(event)
        except Exception as error:
            name = getattr(action, "__name__", type(action).__name__)
            self._failures.put(_Failure(name, event.step, error))
