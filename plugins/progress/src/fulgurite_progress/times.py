"""Show where the wall time of a run went."""

from collections import defaultdict

import fulgurite as fg
from rich.table import Table

_NAMES = {
    "start": "starting",
    "check": "starting",
    "data": "waiting for data",
    "dispatch": "steps",
    "wait": "steps",
    "compile": "compiling",
}


def timing_table(timings: fg.Timings) -> Table:
    """Return a table of seconds and shares by part: steps, waiting for data, compiling,
    evaluations, saving, each plugin."""
    seconds: dict[str, float] = defaultdict(float)
    for name, spent in timings.seconds.items():
        seconds[_get_part(name)] += spent
    total = timings.total
    seconds["everything else"] = max(total - sum(seconds.values()), 0.0)
    table = Table("part", box=None, pad_edge=False, title="time", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        if spent >= 0.0005 * total:
            table.add_row(name, f"{spent:.2f}", f"{spent / total:.1%}")
    table.add_row("total", f"{total:.2f}", "", style="bold")
    return table


def _get_part(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    if name.startswith("evaluate."):
        return f"evaluating {name.removeprefix('evaluate.')}"
    return "saving" if name.endswith(".save_checkpoint") else f"plugin {name.rpartition('.')[0]}"
