"""When things happen: triggers on steps, epochs and the clock, joined with ``|``.
A step is a number of completed updates, and a trigger fires *after* the update that made it. A
trigger is an immutable description; `TriggerState` is one in use."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class StepRange:
    """The steps of one `fit` call: its origin, its planned end (None while that is unknown), and
    where its epochs are known to end, from the first on. It is part of every checkpoint, so a
    resumed fit keeps the one it had."""

    start: int
    stop: int | None = None
    epoch_ends: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"origin": self.start, "end": self.stop, "epoch_ends": list(self.epoch_ends)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StepRange":
        return cls(value["origin"], value["end"], tuple(value["epoch_ends"]))


class UnboundedRange(StepRange):
    """That of a loop of `Engine.step`, which knows of no end and no epochs."""


class Trigger:
    """A rule that says at which steps something happens. It is `exact` if the steps follow from the
    program and its data alone, not from a clock or a process.

    A subclass is a frozen dataclass and defines `_next_after(self, after, span)`: the first step of
    its rule after `after`, or None. It is asked more often than it fires, so `after + 10` would
    never fire.
    """

    exact: ClassVar[bool] = True

    def next(self, after: int, span: StepRange) -> int | None:
        """The first step after `after` at which this fires, or None if no step is known. A pure
        function; the step lies in ``span.origin + 1 .. span.end``, and only `AtStart` gives
        ``span.origin``."""
        after = max(after, span.start)
        step = self._next_after(after, span)
        if step is not None and (not isinstance(step, Integral) or step <= after):
            raise ConfigurationError(
                f"{self!r} gave {step!r} as the next step after {after}; give a later one or None"
            )
        if step is not None and (again := self._next_after(int(step) - 1, span)) != step:
            gap = f"{self!r} gave {step} as the next step after {after}, and {again} as that after {step - 1}"
            raise ConfigurationError(f"{gap}; give the first step of a fixed rule that is later")
        return None if step is None or (span.stop is not None and step > span.stop) else step

    def _next_after(self, after: int, span: StepRange) -> int | None:
        """The first step of this rule later than `after` (at least ``span.origin``), be it past the
        end or not."""
        return None

    def __or__(self, other: "Trigger") -> "Or":
        return Or((self, other)) if isinstance(other, Trigger) else NotImplemented


@dataclass(frozen=True)
class _Counted(Trigger):
    n: int

    def __post_init__(self) -> None:
        _check_positive(self, "n", self.n)


@dataclass(frozen=True)
class Every(_Counted):
    """Every multiple of `n`, counted from step 0 and not from where a fit began or was resumed."""

    def _next_after(self, after: int, span: StepRange) -> int | None:
        return (after // self.n + 1) * self.n


@dataclass(frozen=True)
class FirstSteps(_Counted):
    """The steps 1 to `n`, counted from step 0."""

    def _next_after(self, after: int, span: StepRange) -> int | None:
        return after + 1 if after < self.n else None


@dataclass(frozen=True)
class FirstStepsAfterStart(_Counted):
    """The first `n` steps that a process runs, in a resumed fit too: those after `began`, by
    default the origin."""

    began: int | None = None
    exact: ClassVar[bool] = False

    def _next_after(self, after: int, span: StepRange) -> int | None:
        began = span.start if self.began is None else self.began
        following = max(after, began) + 1
        return following if following <= began + self.n else None


@dataclass(frozen=True)
class EvenlySpaced(_Counted):
    """`n` times in the span, evenly, the last time at its end: ``origin + ceil(i * (end - origin) /
    n)``.

    A span of fewer than `n` steps fires at each of them. While the end is unknown: ``origin + 128,
    256, 512, …``."""

    def _next_after(self, after: int, span: StepRange) -> int | None:
        elapsed = after - span.start
        if span.stop is None:
            return span.start + max(128, 1 << elapsed.bit_length())
        length = span.stop - span.start
        if elapsed >= length:
            return None
        # ceil(i * length / n) > elapsed for the first time at this i
        i = elapsed * self.n // length + 1
        return span.start - (-i * length // self.n)


@dataclass(frozen=True)
class EveryEpoch(_Counted):
    """The end of every `n`-th epoch of the span, as far as the epochs' ends are known."""

    n: int = 1

    def _next_after(self, after: int, span: StepRange) -> int | None:
        number = bisect_right(span.epoch_ends, after) + 1
        number += -number % self.n
        return span.epoch_ends[number - 1] if number <= len(span.epoch_ends) else None


@dataclass(frozen=True, init=False, repr=False)
class At(Trigger):
    """The given steps: ``At(5000)`` or ``At(10, 100, 1000)``."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigurationError("At() has no steps: give at least one, such as At(5000).")
        for step in steps:
            _check_positive(self, "a step", step)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, self.steps))})"

    def _next_after(self, after: int, span: StepRange) -> int | None:
        place = bisect_right(self.steps, after)
        return self.steps[place] if place < len(self.steps) else None


@dataclass(frozen=True)
class Exponential(Trigger):
    """Less and less often: the first gap is `start` steps, each later one `factor` times the one
    before.

    Products are rounded half up, each gap grows by at least one step, and counting starts at step
    0."""

    start: int
    factor: int | float

    def __post_init__(self) -> None:
        _check_positive(self, "start", self.start)
        _check_positive(self, "factor", self.factor, int | float)
        if self.factor <= 1:
            raise ConfigurationError(
                f"Exponential: factor is {self.factor}; it must be greater than 1, such as 1.2."
            )

    def _next_after(self, after: int, span: StepRange) -> int | None:
        step = gap = self.start
        while step <= after:
            gap = max(gap + 1, math.floor(gap * self.factor + 0.5))
            step += gap
        return step


@dataclass(frozen=True)
class AtStart(Trigger):
    """The start of the span, before its first update; never in a resumed fit, which asks from its
    restored step on."""

    def next(self, after: int, span: StepRange) -> int | None:
        return span.start if after < span.start else None


@dataclass(frozen=True)
class AtEnd(Trigger):
    """The end of the span, once it is known."""

    def _next_after(self, after: int, span: StepRange) -> int | None:
        return span.stop if span.stop is not None and span.stop > after else None


@dataclass(frozen=True)
class EverySeconds(Trigger):
    """By the clock: `seconds` after the loop began, and again after each time the action ended."""

    seconds: int | float
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive(self, "seconds", self.seconds, int | float)


@dataclass(frozen=True, init=False, repr=False)
class Or(Trigger):
    """Whenever one of its parts fires; once where several do. Each part keeps its own clock."""

    parts: tuple[Trigger, ...]

    def __init__(self, parts: Iterable[Trigger]) -> None:
        object.__setattr__(
            self, "parts", tuple(part for trigger in parts for part in _parts(trigger))
        )

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def next(self, after: int, span: StepRange) -> int | None:
        return min(
            (step for part in self.parts if (step := part.next(after, span)) is not None),
            default=None,
        )


class TriggerState:
    """A trigger in use for one scheduled action of a loop that begins at `step` and at the time
    `now` (seconds of a monotonic clock). At a step boundary it asks `due`, runs the action if so,
    and then calls `done`. Processes that are given the same times make the same decisions."""

    def __init__(self, trigger: Trigger, step: int, now: float) -> None:
        parts = [
            replace(part, began=step) if isinstance(part, FirstStepsAfterStart) else part
            for part in _parts(trigger)
        ]
        self._rule = Or(parts)
        self._deadlines = {
            part: now + part.seconds for part in parts if isinstance(part, EverySeconds)
        }
        self._due: list[EverySeconds] = []

    def deadline(self) -> float | None:
        """The earliest time at which a clock is due; None without clocks. It changes only with
        `done`."""
        return min(self._deadlines.values(), default=None)

    def next_step(self, after: int, span: StepRange) -> int | None:
        """The first step later than `after` that is due by a step rule, whatever the clocks say."""
        return self._rule.next(after, span)

    def is_due(self, step: int, span: StepRange, now: float) -> bool:
        """Whether the action is due at `step`, by a step rule or, past the origin of `span`, by a
        clock."""
        self._due = [
            clock
            for clock, deadline in self._deadlines.items()
            if deadline <= now and step > span.start
        ]
        return bool(self._due) or self.next_step(step - 1, span) == step

    def mark_done(self, step: int, now: float) -> None:
        """The action that was due at `step` ended at `now`: the clocks that were due begin anew."""
        self._deadlines.update({clock: now + clock.seconds for clock in self._due})


def as_trigger(value: int | Trigger) -> Trigger:
    """A trigger as it is; an integer ``n`` as ``Every(n)``. Anything else is a
    `ConfigurationError`."""
    return value if isinstance(value, Trigger) else Every(value)


def is_exact(trigger: Trigger) -> bool:
    """False if a clock or the process has a say in `trigger`: what it logs is then telemetry."""
    return all(part.exact for part in _parts(trigger))


def _parts(trigger: Trigger) -> tuple[Trigger, ...]:
    return trigger.parts if isinstance(trigger, Or) else (trigger,)


def _check_positive(trigger: Trigger, what: str, value: Any, kinds: Any = int) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
        kind = "integer" if kinds is int else "finite number"
        raise ConfigurationError(
            f"{type(trigger).__name__}: {what} is {value!r}; it must be a positive {kind}."
        )
