"""What each attempt of a run spent its time on, as files in the run directory, and their sum."""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_runs import MAX_JSON_SIZE, dumps, get_folder, loads

from fulgurite_monitor.buckets import BUCKETS

FOLDER = "goodput"
_SIZE = 1024
"""Of a file, in bytes: more than the times of an attempt need."""
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class AttemptTimes:
    """What one attempt of a run spent its time on, as far as it is known.

    Example:
        from fulgurite_monitor import Goodput, read_goodput

        fg.Engine(steps=100, run_dir="runs/a", plugins=[Goodput()]).fit(model, data)
        for attempt in read_goodput("runs/a").attempts:
            print(attempt.attempt, attempt.step, attempt.last_alive - attempt.began)

    Attributes:
        attempt: its number, from 1.
        is_fresh: whether it began the run again on request, `resume="never"`.
        start_step: the step that it began with.
        step: the newest step.
        began: when it began, in seconds since 1970.
        last_alive: its last sign of life, in the same.
        seconds: by bucket.
    """

    attempt: int
    is_fresh: bool
    start_step: int
    step: int
    began: float
    last_alive: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class GoodputReport:
    """Where the time of a run went, over all its attempts.

    Example:
        from fulgurite_monitor import Goodput, read_goodput

        fg.Engine(steps=100, run_dir="runs/a", plugins=[Goodput()]).fit(model, data)
        report = read_goodput("runs/a")
        print(report.goodput, report.seconds["data"], report.seconds["lost"])

    Attributes:
        wall: seconds from the begin of the first attempt to the last sign of life.
        goodput: the share of it in which steps were trained that the run has kept.
        seconds: by bucket; `lost` are those of steps that were trained and then lost, `down` those
            from the last sign of life of an attempt to the begin of the next one.
        attempts: what they were added up from.
    """

    wall: float
    goodput: float
    seconds: dict[str, float]
    attempts: tuple[AttemptTimes, ...]


def read_goodput(run: str | os.PathLike[str]) -> GoodputReport:
    """Return where the time of a run went, as the plugin `Goodput` has noted it. It may be running.

    Args:
        run: the run directory.

    Raises:
        ConfigurationError: the plugin has not noted anything there, or a file is damaged.
    """
    attempts = [times for path in list_attempts(Path(run)) if (times := read_attempt(path))]
    if not attempts:
        raise ConfigurationError(
            f"{os.fspath(run)} holds no times: give the directory of a run that was trained with "
            "the plugin 'goodput'"
        )
    return add_up(attempts)


def add_up(attempts: Sequence[AttemptTimes]) -> GoodputReport:
    """Return the sum of attempts, from the newest that began the run again.

    Args:
        attempts: in their order, at least one.
    """
    first = max((index for index, attempt in enumerate(attempts) if attempt.is_fresh), default=0)
    attempts = attempts[first:]
    totals = dict.fromkeys((*BUCKETS, "lost", "down"), 0.0)
    for index, attempt in enumerate(attempts):
        later = attempts[index + 1 :]
        for bucket, value in attempt.seconds.items():
            totals[bucket] += value
        lost = attempt.seconds["steps"] * _compute_lost_share(attempt, later)
        totals["steps"] -= lost
        totals["lost"] += lost
        if later:
            totals["down"] += max(0.0, later[0].began - attempt.last_alive)
    wall = sum(totals.values())
    goodput = totals["steps"] / wall if wall > 0 else 0.0
    return GoodputReport(wall, goodput, totals, tuple(attempts))


def _compute_lost_share(attempt: AttemptTimes, later: Sequence[AttemptTimes]) -> float:
    """Return the share of the steps of an attempt that later ones did not continue from.

    Args:
        attempt: the attempt.
        later: the attempts after it.
    """
    num_steps = attempt.step - attempt.start_step
    if num_steps <= 0:
        return 0.0
    last_kept = min((attempt.step, *(other.start_step for other in later)))
    return 1 - max(0, last_kept - attempt.start_step) / num_steps


def list_attempts(run: Path) -> list[Path]:
    """Return the files of the attempts of a run, in their order.

    Args:
        run: the run directory.
    """
    folder = get_folder(run, FOLDER)
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    return [folder / str(number) for number in numbers]


class AttemptFile:
    """The file of an attempt that is running. A write is one system call within a page, so that a
    process that is killed leaves the file whole, or empty if it had not written yet.

    Args:
        run: the run directory.
        attempt: its number.
    """

    def __init__(self, run: Path, attempt: int) -> None:
        folder = get_folder(run, FOLDER)
        folder.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(folder / str(attempt), flags, 0o644)

    def write(self, times: AttemptTimes) -> None:
        """Replace what is noted."""
        content = dumps(vars(times)).encode().ljust(_SIZE)
        if os.pwrite(self._descriptor, content, 0) != len(content):
            raise OSError(errno.ENOSPC, "the disk is full")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_attempt(path: Path) -> AttemptTimes | None:
    """Return what was noted of an attempt; None if it was killed, or the disk was full, before
    anything was.

    Args:
        path: of its file.

    Raises:
        ConfigurationError: the file is damaged.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            return None
        if size > MAX_JSON_SIZE:
            raise ValueError("it is too large")
        return _parse_attempt(loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} does not say what an attempt spent its time on: {error}; remove it"
        ) from error


def _parse_attempt(content: Any) -> AttemptTimes:
    """Return the times that a file holds, which may have been edited.

    Raises:
        ValueError: they are not what `AttemptFile` writes.
        TypeError: likewise.
    """
    names = {field.name for field in fields(AttemptTimes)}
    if not isinstance(content, dict) or content.keys() != names:
        raise ValueError(f"it lacks {', '.join(sorted(names))}")
    times = AttemptTimes(**content)
    numbers = (times.began, times.last_alive, *times.seconds.values())
    counts = (times.attempt, times.start_step, times.step)
    are_valid = (
        times.seconds.keys() == set(BUCKETS)
        and all(type(number) in (int, float) and 0 <= number < 1e15 for number in numbers)
        and all(type(count) is int and 0 <= count < 2**63 for count in counts)
        and type(times.is_fresh) is bool
    )
    if not are_valid:
        raise ValueError("its numbers are none that a run writes")
    return times
