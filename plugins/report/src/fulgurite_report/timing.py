"""Where the time of a run went, in the words of users."""

from collections import defaultdict
from collections.abc import Mapping

from fulgurite_report.curves import Curve

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
    "down",
    "plugins",
)
"""What a part may be of, for its colour."""


def group_timings(timings: dict[str, float]) -> dict[str, float]:
    """Return seconds by part: steps, waiting for data, evaluations, saving, compiling, starting,
    plugins; of what is of one kind, the largest first.

    Args:
        timings: seconds by the names of `fg.Timings`.
    """
    seconds: dict[str, float] = defaultdict(float)
    for name, spent in timings.items():
        seconds[_get_part(name)] += spent
    total = sum(seconds.values())
    parts = {part: spent for part, spent in seconds.items() if spent >= 0.0005 * total}
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
    return {part: seconds for part, seconds in newest.items() if 0 < seconds < 1e15}


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
    return "saving" if name.endswith(".save_checkpoint") else f"plugin {name.partition('.')[0]}"
