"""When things happen: triggers on steps, epochs and the clock, joined with ``|``.

A step is a number of completed updates, and a trigger fires *after* the update that made it. A
trigger is an immutable description; `TriggerState` is one in use."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite.errors import (
    ConfigurationError,
    as_int,
    check_positive_int,
    set_ints,
)


@dataclass(frozen=True)
class StepRange:
    """The steps of one `fit` call.

    It is part of every checkpoint, so a resumed fit keeps the one it had.

    Example:
        step_range = fg.StepRange(start=0, stop=1000, epoch_ends=(500, 1000))
        fg.EveryEpoch().next(after=500, step_range=step_range)  # 1000

    Attributes:
        start: the number of updates completed before the fit.
        stop: its planned last step; None while that is unknown.
        epoch_ends: the steps where its epochs are known to end, from the first on.
    """

    start: int
    stop: int | None = None
    epoch_ends: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value, as checkpoints hold it."""
        return {"start": self.start, "stop": self.stop, "epoch_ends": list(self.epoch_ends)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StepRange":
        """Return the range that `to_json` wrote."""
        return cls(value["start"], value["stop"], tuple(value["epoch_ends"]))


class UnboundedRange(StepRange):
    """The range of a loop of `Engine.step`, which knows of no end and no epochs.

    A class of its own, so that an update rule that waits for one of these can say so instead of
    waiting forever.

    Example:
        from fulgurite.plugins import UnboundedRange

        step_range = UnboundedRange(0)
        step_range.stop  # None
    """


class Trigger:
    """A rule that says at which steps something happens.

    A subclass is a frozen dataclass and defines `_next_after(self, after, step_range)`: the first
    step of its rule after `after`, or None. It is asked more often than it fires, so `after + 10`
    would never fire.

    Example:
        log_every = fg.Every(100) | fg.AtEnd()
        engine = fg.Engine(steps=1000, log_every=log_every)

    Attributes:
        exact: whether the steps follow from the program and its data alone, not from a clock or a
            process.
    """

    exact: ClassVar[bool] = True

    def next(self, after: int, step_range: StepRange) -> int | None:
        """Return the first step at which this fires, or None if no step is known.

        A pure function. The step lies in ``step_range.start + 1 .. step_range.stop``; only
        `AtStart` gives ``step_range.start``.

        Args:
            after: a step; the result is later.
            step_range: the steps of the fit.

        Raises:
            ConfigurationError: the rule of a subclass is not a fixed one.
        """
        after = max(after, step_range.start)
        step = self._next_after(after, step_range)
        if step is not None and (not isinstance(step, Integral) or step <= after):
            raise ConfigurationError(
                f"{self!r} returned {step!r} as the next step after {after}; return a later one "
                "or None"
            )
        if step is None:
            return None
        again = self._next_after(int(step) - 1, step_range)
        if again != step:
            raise ConfigurationError(
                f"{self!r} returned {step} as the next step after {after}, and {again} as that "
                f"after {step - 1}; give the first step of a fixed rule that is later"
            )
        is_past_end = step_range.stop is not None and step > step_range.stop
        return None if is_past_end else int(step)

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        """Return the first step of this rule later than `after`, be it past the end or not.

        Args:
            after: at least ``step_range.start``.
            step_range: the steps of the fit.
        """
        return None

    def __or__(self, other: "Trigger") -> "Or":
        return Or((self, other)) if isinstance(other, Trigger) else NotImplemented


@dataclass(frozen=True)
class _Counted(Trigger):
    n: int

    def __post_init__(self) -> None:
        set_ints(self, "n")
        check_positive_int(self.n, f"{type(self).__name__}: n")


@hide_constructor_frames
@dataclass(frozen=True)
class Every(_Counted):
    """Every multiple of `n`, counted from step 0 and not from where a fit began or was resumed.

    Example:
        engine = fg.Engine(steps=1000, log_every=fg.Every(100))
    """

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        return (after // self.n + 1) * self.n


@hide_constructor_frames
@dataclass(frozen=True)
class FirstSteps(_Counted):
    """The steps 1 to `n`, counted from step 0.

    Example:
        log_every = fg.FirstSteps(10) | fg.Every(100)
    """

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        return after + 1 if after < self.n else None


@hide_constructor_frames
@dataclass(frozen=True)
class FirstStepsAfterStart(_Counted):
    """The first `n` steps that a process runs, in a resumed fit too: those after `process_start`,
    by default the start of the range.

    Example:
        log_every = fg.FirstStepsAfterStart(5) | fg.Every(100)
    """

    process_start: int | None = None
    exact: ClassVar[bool] = False

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        start = step_range.start if self.process_start is None else self.process_start
        following = max(after, start) + 1
        return following if following <= start + self.n else None


@hide_constructor_frames
@dataclass(frozen=True)
class EvenlySpaced(_Counted):
    """`n` times in a fit, evenly, the last time at its end.

    The steps are ``start + ceil(i * (stop - start) / n)``.
    A range of fewer than `n` steps fires at each of them. While its end is unknown: ``start + 128,
    256, 512, …``. If the epochs of a fit differ in length, its end moves: the steps up to there are
    as they were, those that follow are divided by the new end, and the user is told how many these
    are.

    Example:
        trigger = fg.EvenlySpaced(4)
        trigger.next(0, fg.StepRange(0, 1000))  # 250
    """

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        elapsed = after - step_range.start
        if step_range.stop is None:
            return step_range.start + max(128, 1 << elapsed.bit_length())
        length = step_range.stop - step_range.start
        if elapsed >= length:
            return None
        # ceil(i * length / n) > elapsed for the first time at this i
        i = elapsed * self.n // length + 1
        return step_range.start - (-i * length // self.n)


@hide_constructor_frames
@dataclass(frozen=True)
class EveryEpoch(_Counted):
    """The end of every `n`-th epoch of a fit, as far as the epochs' ends are known.

    Example:
        log_every = fg.EveryEpoch()
        every_other_epoch = fg.EveryEpoch(2)
    """

    n: int = 1

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        number = bisect_right(step_range.epoch_ends, after) + 1
        number += -number % self.n
        return step_range.epoch_ends[number - 1] if number <= len(step_range.epoch_ends) else None


@hide_constructor_frames
@dataclass(frozen=True, init=False, repr=False)
class At(Trigger):
    """The given steps: ``At(5000)`` or ``At(10, 100, 1000)``.

    Example:
        trigger = fg.At(10, 100, 1000)
        trigger.next(10, fg.StepRange(0))  # 100
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigurationError("At() has no steps: give at least one, such as At(5000).")
        steps = tuple(as_int(step) for step in steps)
        for step in steps:
            check_positive_int(step, "At: a step")
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, self.steps))})"

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        index = bisect_right(self.steps, after)
        return self.steps[index] if index < len(self.steps) else None


@hide_constructor_frames
@dataclass(frozen=True)
class Exponential(Trigger):
    """Less and less often: the first interval is `start` steps, each later one `factor` times the
    one before.

    Products are rounded half up, each interval grows by at least one step, and counting starts at
    step 0.

    Example:
        # At the steps 100, 300, 700, 1500, ...
        log_every = fg.Exponential(start=100, factor=2)
    """

    start: int
    factor: int | float

    def __post_init__(self) -> None:
        set_ints(self, "start")
        check_positive_int(self.start, "Exponential: start")
        _check_positive_number(self.factor, "Exponential: factor")
        if self.factor <= 1:
            raise ConfigurationError(
                f"Exponential: factor is {self.factor}; it must be greater than 1, such as 1.2."
            )

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        interval = self.start
        step = interval
        while step <= after:
            interval = max(interval + 1, math.floor(interval * self.factor + 0.5))
            step += interval
        return step


@dataclass(frozen=True)
class AtStart(Trigger):
    """The start of a fit, before its first update; never in a resumed fit, which asks from its
    restored step on.

    Example:
        evaluate_at = fg.AtStart() | fg.Every(500)
    """

    def next(self, after: int, step_range: StepRange) -> int | None:
        return step_range.start if after < step_range.start else None


@dataclass(frozen=True)
class AtEnd(Trigger):
    """The end of a fit, once it is known.

    Example:
        log_every = fg.Every(100) | fg.AtEnd()
    """

    def _next_after(self, after: int, step_range: StepRange) -> int | None:
        return step_range.stop if step_range.stop is not None and step_range.stop > after else None


@hide_constructor_frames
@dataclass(frozen=True)
class EverySeconds(Trigger):
    """By the clock: `seconds` after the loop began, and again after each time the action ended.

    Example:
        # Save every ten minutes and at the end.
        save_at = fg.EverySeconds(600) | fg.AtEnd()
    """

    seconds: int | float
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive_number(self.seconds, "EverySeconds: seconds")


@dataclass(frozen=True, init=False, repr=False)
class Or(Trigger):
    """Whenever one of its parts fires; once where several do. Each part keeps its own clock.

    Example:
        from fulgurite.plugins import Or

        trigger = fg.Every(100) | fg.AtEnd()
        isinstance(trigger, Or)  # True
    """

    parts: tuple[Trigger, ...]

    def __init__(self, parts: Iterable[Trigger]) -> None:
        flat = tuple(part for trigger in parts for part in _get_parts(trigger))
        object.__setattr__(self, "parts", flat)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def next(self, after: int, step_range: StepRange) -> int | None:
        steps = [part.next(after, step_range) for part in self.parts]
        return min((step for step in steps if step is not None), default=None)


class TriggerState:
    """A trigger in use for one scheduled action of a loop.

    At a step boundary the loop asks `is_due`, runs the action if so, and then calls `mark_done`.
    Processes that are given the same times make the same decisions.
    """

    def __init__(self, trigger: Trigger, step: int, now: float) -> None:
        """Begin to use a trigger.

        Args:
            trigger: when the action is due.
            step: where the loop begins.
            now: the time then, in seconds of a monotonic clock.
        """
        parts = [
            replace(part, process_start=step) if isinstance(part, FirstStepsAfterStart) else part
            for part in _get_parts(trigger)
        ]
        self._rule = Or(parts)
        self._deadlines = {
            part: now + part.seconds for part in parts if isinstance(part, EverySeconds)
        }
        self._due: list[EverySeconds] = []
        # The answer of `next_step` to the question before it.
        self._asked: tuple[int, StepRange] | None = None
        self._answer: int | None = None

    def deadline(self) -> float | None:
        """Return the earliest time at which a clock is due; None without clocks.

        It changes only with `mark_done`.
        """
        return min(self._deadlines.values(), default=None)

    def next_step(self, after: int, step_range: StepRange) -> int | None:
        """Return the first step later than `after` that is due by a step rule, whatever the clocks
        say."""
        # A trigger is a pure function, so its answer holds until that step. With a thousand actions
        # to ask each again took 12 ms for every step at which one of them was due.
        if self._asked is not None:
            asked_after, asked_range = self._asked
            is_before_answer = self._answer is None or after < self._answer
            if asked_after <= after and is_before_answer and step_range == asked_range:
                return self._answer
        self._answer = self._rule.next(after, step_range)
        self._asked = after, step_range
        return self._answer

    def is_due(self, step: int, step_range: StepRange, now: float) -> bool:
        """Return whether the action is due, by a step rule or, past the start of a fit, by a clock.

        Args:
            step: the number of completed updates.
            step_range: the steps of the fit.
            now: seconds of the monotonic clock.
        """
        if self._deadlines:
            self._due = [
                clock
                for clock, deadline in self._deadlines.items()
                if deadline <= now and step > step_range.start
            ]
        return bool(self._due) or self.next_step(step - 1, step_range) == step

    def mark_done(self, step: int, now: float) -> None:
        """Start the clocks again that were due.

        Args:
            step: where the action was due.
            now: when it ended.
        """
        self._deadlines.update({clock: now + clock.seconds for clock in self._due})


def as_trigger(value: int | Trigger) -> Trigger:
    """Return a trigger as it is and an integer ``n`` as ``Every(n)``.

    Raises a ConfigurationError for anything else.
    """
    return value if isinstance(value, Trigger) else Every(value)


def is_exact(trigger: Trigger) -> bool:
    """Return False if a clock or the process has a say in a trigger: what it logs is then
    telemetry, evaluations included."""
    return all(part.exact for part in _get_parts(trigger))


def _get_parts(trigger: Trigger) -> tuple[Trigger, ...]:
    return trigger.parts if isinstance(trigger, Or) else (trigger,)


def _check_positive_number(value: Any, label: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigurationError(f"{label} is {value!r}; it must be a positive finite number")
