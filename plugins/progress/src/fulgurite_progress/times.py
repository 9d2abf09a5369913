"""Show where the wall time of a run went, and what it is doing now."""

from collections import defaultdict

import fulgurite as fg
from fulgurite.plugins import Activity
from rich.table import Table

_PARTS = {
    "start": "starting",
    "check": "starting",
    "data": "waiting for data",
    "dispatch": "steps",
    "wait": "steps",
    "compile": "compiling",
}


def timing_table(timings: fg.Timings) -> Table:
    """Return a table of seconds and shares by part: steps, waiting for data, compiling,
    evaluations, saving, restoring, each plugin."""
    seconds: dict[str, float] = defaultdict(float)
    for name, spent in timings.seconds.items():
        seconds[get_part(name)] += spent
    total = timings.total
    seconds["everything else"] = max(total - sum(seconds.values()), 0.0)
    table = Table("part", box=None, pad_edge=False, title="time of this fit", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        if spent >= 0.0005 * total:
            table.add_row(name, f"{spent:.2f}", f"{spent / total:.1%}")
    for name, spent in timings.background_seconds.items():
        # Beside the others, which add up to the total.
        if spent >= 0.0005 * total:
            table.add_row(f"{get_part(name)} in background", f"{spent:.2f}", "")
    table.add_row("total", f"{total:.2f}", "", style="bold")
    return table


def get_part(name: str) -> str:
    """Return what a user calls the work for which `Timings` measures time by this name."""
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith("evaluate."):
        return f"evaluating {name.removeprefix('evaluate.')}"
    if name.endswith(".restore_checkpoint"):
        return "restoring"
    return "saving" if name.endswith(".save_checkpoint") else f"plugin {name.partition('.')[0]}"


def describe_activity(timed_names: list[str]) -> str:
    """Return what is going on besides steps.

    Args:
        timed_names: the names, from the outermost, of what is being timed; another thread may
            change the list meanwhile.
    """
    parts = [get_part(name) for name in list(timed_names)]
    for part in reversed(parts):
        # An evaluation or a save within an action says more than the plugin whose action it is.
        if part in ("compiling", "saving", "restoring") or part.startswith("evaluating "):
            return part
    part = parts[0] if parts else ""
    return "" if part in ("steps", "waiting for data", "plugin progress") else part


def find_activity(timings: fg.Timings) -> tuple[str, Activity | None]:
    """Return what is going on besides steps, and what describes it in more words, if anything does.

    Args:
        timings: of the fit; another thread may change what is active meanwhile.
    """
    names = list(timings.active_names)
    activities = list(timings.activities)
    if not activities:
        return describe_activity(names), None
    activity = activities[-1]
    if "compile" in names[activity.depth :]:
        return "compiling", None
    return activity.text, activity
