"""The attempts of a run: when each began, and when it last gave a sign of life."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fulgurite_report.lines import read_json

LATEST = 1e11
"""The latest time, in seconds since 1970, that is believed."""
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass
class Attempt:
    """A start of a run.

    Attributes:
        number: from 1.
        began: when its process began, or its fit if that is not the first one there, in seconds
            since 1970.
        last_sign: when it last gave a sign of life, in seconds since 1970.
        start_step: the step that it began with; None if its manifest does not say so.
        first_step: of its first record that has a time; None if it has none.
        last_step: the newest step that it is known to have reached, by its records that have a time
            and by its checkpoints; None if it has none.
        before_fit: the seconds between its beginning and that of its fit, such as for imports, as
            far as they are known.
    """

    number: int
    began: float
    last_sign: float
    start_step: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    before_fit: float = 0.0

    @property
    def seconds(self) -> float:
        """Its run time: how long it is known to have been alive."""
        return max(self.last_sign - self.began, 0.0)

    @property
    def first_known_step(self) -> int | None:
        """The step that it began with; where that is not known, the first one that is."""
        return self.first_step if self.start_step is None else self.start_step

    def note_step(self, step: int) -> None:
        """Note that it has reached a step."""
        self.last_step = max(self.last_step or 0, step)

    def note_sign(self, wall_time: Any) -> None:
        """Note that it was alive at a time, in seconds since 1970, unless that is not a time."""
        if is_time(wall_time):
            self.last_sign = max(self.last_sign, wall_time)


def is_time(value: Any) -> TypeGuard[float]:
    """Return whether a value of JSON can be a time in seconds since 1970."""
    return type(value) in (int, float) and 0 <= value < LATEST


def list_attempts(run: Path) -> list[int]:
    """Return the numbers of the attempts of a run, in their order."""
    try:
        names = os.listdir(run / "attempts")
    except OSError:
        return []
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def read_attempts(run: Path) -> tuple[list[Attempt], dict[str, Any]]:
    """Return the attempts of a run, oldest first, and the newest manifest that is not empty."""
    attempts = []
    manifest: dict[str, Any] = {}
    for number in list_attempts(run):
        path = run / "attempts" / str(number)
        content = read_json(path)
        manifest = content or manifest
        try:
            written = path.stat().st_mtime
        except OSError:
            continue
        began: Any = content.get("began", written)
        attempt = Attempt(number, began, began) if is_time(began) else None
        attempt = attempt or Attempt(number, written, written)
        start_step: Any = content.get("start_step")
        if type(start_step) is int and start_step >= 0:
            attempt.start_step = start_step
        fit_began: Any = content.get("fit_began")
        if is_time(fit_began):
            attempt.before_fit = max(fit_began - attempt.began, 0.0)
        note_alive(run, attempt)
        attempts.append(attempt)
    return attempts, manifest


def note_alive(run: Path, attempt: Attempt) -> None:
    """Note what the plugin `goodput` has noted of an attempt."""
    attempt.note_sign(read_json(run / "goodput" / str(attempt.number)).get("last_alive"))
