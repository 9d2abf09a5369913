"""When things happen: triggers on steps, epochs and the clock, joined with ``|``.

A step is a number of completed updates, and a trigger fires *after* the update that made it. A trigger is an
immutable description; `Trigger.start` arms it for one scheduled action of a running loop.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class Span:
    """The steps of one `fit` call. It is part of every checkpoint, so a resumed fit keeps the one it had.

    Attributes:
        origin: the step at which the fit began.
        end: its planned last step; None while that is unknown.
        epoch_ends: the steps at which epochs are known to end, in increasing order, from the first epoch on.
    """

    origin: int
    end: int | None = None
    epoch_ends: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"origin": self.origin, "end": self.end, "epoch_ends": list(self.epoch_ends)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Span":
        return cls(value["origin"], value["end"], tuple(value["epoch_ends"]))


class Trigger:
    """A rule that says at which steps something happens. Subclasses are frozen dataclasses and define `next`.

    Attributes:
        exact: whether the steps follow from the program and its data alone, not from a clock or a process.
    """

    exact: ClassVar[bool] = True

    def next(self, after: int, span: Span) -> int | None:
        """The first step later than `after` at which this fires in `span`; None if there is none (or none by steps).

        A pure function. The step lies in ``span.origin + 1 .. span.end``; only `AtStart` gives ``span.origin``.
        """
        step = self._following(max(after, span.origin), span)
        return None if step is None or (span.end is not None and step > span.end) else step

    def _following(self, after: int, span: Span) -> int | None:
        """The first step of this rule later than `after` (at least ``span.origin``), be it past the end or not."""
        return None

    @property
    def parts(self) -> "tuple[Trigger, ...]":
        """The triggers that ``|`` joined to make this one; the trigger itself if none."""
        return (self,)

    def in_process(self, step: int) -> "Trigger":
        """This trigger in a process that begins at `step`: itself, except for `FirstOfProcess`."""
        return self

    def start(self, step: int, now: float) -> "Armed":
        """Arms this trigger in a loop that begins at `step` and at the time `now` (seconds of a monotonic clock)."""
        return Armed(self, step, now)

    def __or__(self, other: "Trigger") -> "Or":
        return Or((self, other)) if isinstance(other, Trigger) else NotImplemented


@dataclass(frozen=True)
class Every(Trigger):
    """Every multiple of `n`, counted from step 0 and not from where a fit began or was resumed."""

    n: int

    def __post_init__(self) -> None:
        _positive_int(self, "n", self.n)

    def _following(self, after: int, span: Span) -> int | None:
        return (after // self.n + 1) * self.n


@dataclass(frozen=True, init=False, repr=False)
class At(Trigger):
    """The given steps: ``At(5000)`` or ``At(10, 100, 1000)``."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigurationError("At() has no steps: give at least one, such as At(5000).")
        for step in steps:
            _positive_int(self, "a step", step)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, self.steps))})"

    def _following(self, after: int, span: Span) -> int | None:
        return next((step for step in self.steps if step > after), None)


@dataclass(frozen=True)
class First(Trigger):
    """The steps 1 to `n`, counted from step 0."""

    n: int

    def __post_init__(self) -> None:
        _positive_int(self, "n", self.n)

    def _following(self, after: int, span: Span) -> int | None:
        return after + 1 if after < self.n else None


@dataclass(frozen=True)
class Times(Trigger):
    """`n` times in the span, evenly, the last time at its end: ``origin + ceil(i * (end - origin) / n)``.

    A span of fewer than `n` steps gives each of them. While the end is unknown: ``origin + 128, 256, 512, …``.
    """

    n: int

    def __post_init__(self) -> None:
        _positive_int(self, "n", self.n)

    def _following(self, after: int, span: Span) -> int | None:
        elapsed = after - span.origin
        if span.end is None:
            return span.origin + max(128, 1 << elapsed.bit_length())
        length = span.end - span.origin
        if elapsed >= length:
            return None
        # ceil(i * length / n) > elapsed for the first time at this i
        i = elapsed * self.n // length + 1
        return span.origin - (-i * length // self.n)


@dataclass(frozen=True, init=False)
class Exponential(Trigger):
    """Ever more seldom: the first gap is `start` steps, each later one `factor` times the one before.

    A product is rounded half up, and each gap is at least one step longer than the one before. The steps are
    counted from step 0, so a resumed fit stays on the same ones.
    """

    first_gap: int
    factor: int | float

    # written out, because a field called `start` would hide the method
    def __init__(self, start: int, factor: int | float) -> None:
        _positive_int(self, "start", start)
        _positive_number(self, "factor", factor)
        if factor <= 1:
            raise ConfigurationError(f"Exponential: factor is {factor}; it must be greater than 1, such as 1.2.")
        object.__setattr__(self, "first_gap", start)
        object.__setattr__(self, "factor", factor)

    def _following(self, after: int, span: Span) -> int | None:
        step = gap = self.first_gap
        while step <= after:
            gap = max(gap + 1, math.floor(gap * self.factor + 0.5))
            step += gap
        return step


@dataclass(frozen=True)
class EveryEpoch(Trigger):
    """The end of every `n`-th epoch of the span, as far as the epochs' ends are known."""

    n: int = 1

    def __post_init__(self) -> None:
        _positive_int(self, "n", self.n)

    def _following(self, after: int, span: Span) -> int | None:
        number = bisect_right(span.epoch_ends, after) + 1
        number += -number % self.n
        return span.epoch_ends[number - 1] if number <= len(span.epoch_ends) else None


@dataclass(frozen=True)
class AtStart(Trigger):
    """Where the span begins, before its first update.

    A fresh fit asks from ``origin - 1`` on and gets it; a resumed one asks from its restored step on and does not.
    """

    def next(self, after: int, span: Span) -> int | None:
        return span.origin if after < span.origin else None


@dataclass(frozen=True)
class AtEnd(Trigger):
    """The end of the span, once it is known."""

    def _following(self, after: int, span: Span) -> int | None:
        return span.end if span.end is not None and span.end > after else None


@dataclass(frozen=True)
class Period(Trigger):
    """By the clock: `seconds` after the loop began and after each time that the action has ended."""

    seconds: int | float
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive_number(self, "seconds", self.seconds)


@dataclass(frozen=True)
class FirstOfProcess(Trigger):
    """The first `n` steps that a process runs: of a fresh fit as of each resumed one.

    Attributes:
        began: the step at which the process began, set by `in_process`; until then, the span's origin.
    """

    n: int
    began: int | None = None
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive_int(self, "n", self.n)

    def in_process(self, step: int) -> "FirstOfProcess":
        return replace(self, began=step)

    def _following(self, after: int, span: Span) -> int | None:
        began = span.origin if self.began is None else self.began
        following = max(after, began) + 1
        return following if following <= began + self.n else None


@dataclass(frozen=True, init=False, repr=False)
class Or(Trigger):
    """Whenever one of its parts fires; once where several do. Each part keeps its own clock."""

    joined: tuple[Trigger, ...]

    def __init__(self, parts: Iterable[Trigger]) -> None:
        joined = tuple(part for trigger in parts for part in trigger.parts)
        if not joined:
            raise ConfigurationError("Or() has no parts: give at least one trigger.")
        object.__setattr__(self, "joined", joined)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.joined))

    @property
    def parts(self) -> tuple[Trigger, ...]:
        return self.joined

    def next(self, after: int, span: Span) -> int | None:
        return _earliest(self.joined, after, span)


class Armed:
    """A trigger in use for one scheduled action of a running loop: its step rules and its clocks.

    At a step boundary the loop asks `due` once, runs the action if so, and then calls `done`. Processes that are
    given the same times make the same decisions.
    """

    def __init__(self, trigger: Trigger, step: int, now: float) -> None:
        self._rules = tuple(part.in_process(step) for part in trigger.parts)
        self._periods = tuple(part.seconds for part in trigger.parts if isinstance(part, Period))
        self._deadlines = [now + seconds for seconds in self._periods]
        self._due_clocks: list[int] = []

    @property
    def has_clock(self) -> bool:
        return bool(self._periods)

    def deadline(self) -> float | None:
        """The earliest time at which a clock is due; None without clocks. It changes only with `done`."""
        return min(self._deadlines, default=None)

    def next_step(self, after: int, span: Span) -> int | None:
        """The first step later than `after` that is due by a step rule, whatever the clocks say."""
        return _earliest(self._rules, after, span)

    def due(self, step: int, span: Span, now: float) -> bool:
        """Whether the action is due at `step`, by a step rule or, past the origin of `span`, by a clock."""
        clocks = enumerate(self._deadlines) if step > span.origin else ()
        self._due_clocks = [number for number, deadline in clocks if deadline <= now]
        return bool(self._due_clocks) or self.next_step(step - 1, span) == step

    def done(self, step: int, now: float) -> None:
        """The action that was due at `step` ended at `now`: the clocks that were due begin anew."""
        for number in self._due_clocks:
            self._deadlines[number] = now + self._periods[number]
        self._due_clocks = []


def as_trigger(value: int | Trigger) -> Trigger:
    """A trigger as it is; an integer ``n`` as ``Every(n)``. Anything else is a `ConfigurationError`."""
    return value if isinstance(value, Trigger) else Every(value)


def is_exact(trigger: Trigger) -> bool:
    """False if a clock or the process has a say in `trigger`: what it logs is then telemetry."""
    return all(part.exact for part in trigger.parts)


def _earliest(triggers: Iterable[Trigger], after: int, span: Span) -> int | None:
    steps = (trigger.next(after, span) for trigger in triggers)
    return min((step for step in steps if step is not None), default=None)


def _positive_int(trigger: Trigger, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{type(trigger).__name__}: {what} is {value!r}; it must be a positive integer.")


def _positive_number(trigger: Trigger, what: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigurationError(f"{type(trigger).__name__}: {what} is {value!r}; it must be a positive finite number.")
