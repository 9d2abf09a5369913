"""Where the time of a run went, in the words of users."""

from collections import defaultdict
from collections.abc import Mapping

from fulgurite_report.curves import Curve
from fulgurite_report.run import Run

_PARTS = {
    "start": "starting",
    "check": "starting",
    "data": "waiting for data",
    "dispatch": "steps",
    "wait": "steps",
    "compile": "compiling",
}
_BUCKETS = {
    "steps": "steps",
    "data": "waiting for data",
    "evaluation": "evaluating",
    "save": "saving",
    "compile": "compiling",
    "start": "starting",
    "restore": "restoring",
    "lost": "lost steps",
    "down": "down",
    "other": "other",
}
"""What `fulgurite_monitor.Goodput` calls the parts, and what users call them."""
KINDS = (
    "steps",
    "waiting for data",
    "evaluating",
    "saving",
    "compiling",
    "starting",
    "restoring",
    "lost steps",
    "plugins",
    "not recorded",
    "down",
)
"""What a part may be of, for its colour."""


def group_timings(timings: dict[str, float]) -> dict[str, float]:
    """Return seconds by part: steps, waiting for data, evaluations, saving, compiling, starting,
    restoring, plugins; of what is of one kind, the largest first.

    Args:
        timings: seconds by the names of `fg.Timings`.
    """
    seconds: dict[str, float] = defaultdict(float)
    for name, spent in timings.items():
        seconds[_get_part(name)] += spent
    parts = _drop_small(seconds)
    return dict(sorted(parts.items(), key=lambda item: (KINDS.index(get_kind(item[0])), -item[1])))


def find_goodput(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return seconds by part over all attempts, as the plugin `goodput` logged them last; an empty
    dictionary if it did not.

    Args:
        curves: of a run.
    """
    newest = {
        part: curves[f"goodput/{bucket}_seconds"].last
        for bucket, part in _BUCKETS.items()
        if f"goodput/{bucket}_seconds" in curves
    }
    newest = {part: seconds for part, seconds in newest.items() if 0 < seconds < 1e15}
    return _drop_small(newest)


def find_parts(run: Run) -> dict[str, float]:
    """Return seconds by part over all attempts of a run; an empty dictionary if there are none.

    They are those that `goodput` logged last, or of the newest checkpoint. Together with `not
    recorded` they are the run time: with what came after that, and without `goodput` what
    attempts lost. `down` are the pauses besides.
    """
    parts, _ = find_recorded(run)
    if not parts:
        return {}
    down = parts.pop("down", None)
    seconds = find_seconds(run)
    parts = _drop_small(parts | {"not recorded": seconds - sum(parts.values())})
    return parts if down is None else parts | {"down": down}


def find_recorded(run: Run) -> tuple[dict[str, float], int]:
    """Return the seconds by part that a run recorded, and the step up to which: as `goodput` logged
    them last, or as of the newest checkpoint; an empty dictionary if neither is there."""
    parts = find_goodput(run.curves)
    if parts:
        names = [f"goodput/{bucket}_seconds" for bucket in _BUCKETS]
        return parts, max(run.curves[name].steps[-1] for name in names if name in run.curves)
    if not run.checkpoints:
        return {}, 0
    newest = run.checkpoints[-1]
    before_fits = sum(attempt.before_fit for attempt in run.attempts)
    # The times of a fit begin with it, and imports with the process.
    timings = newest.timings | {"start": newest.timings.get("start", 0.0) + before_fits}
    return group_timings(timings), newest.step


def find_seconds(run: Run) -> float:
    """Return the run time, the one that everything here shows: how long the processes of a run were
    alive, without the pauses between them."""
    parts, _ = find_recorded(run)
    # Of a run that was written before attempts noted when they began, the parts know more.
    return max(run.seconds, sum(parts.values()) - parts.get("down", 0.0))


def _drop_small(parts: dict[str, float]) -> dict[str, float]:
    """Return parts without those that no bar shows."""
    total = sum(parts.values())
    return {part: seconds for part, seconds in parts.items() if seconds >= 0.0005 * total}


def get_kind(part: str) -> str:
    """Return which of `KINDS` a part is of."""
    if part.startswith("evaluating "):
        return "evaluating"
    return part if part in KINDS else "plugins"


def _get_part(name: str) -> str:
    """Return what a user calls the work for which time was measured by this name, as the table of
    `fulgurite-progress` does."""
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith("evaluate."):
        return f"evaluating {name.removeprefix('evaluate.')}"
    if name.endswith(".restore_checkpoint"):
        return "restoring"
    return "saving" if name.endswith(".save_checkpoint") else f"plugin {name.partition('.')[0]}"
