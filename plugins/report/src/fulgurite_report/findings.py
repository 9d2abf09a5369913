"""What stands out in several runs, in sentences: the best, the slowest and why, and the cost."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number, format_seconds
from fulgurite_report.timing import find_recorded, find_seconds

_ONCE = ("starting", "compiling", "restoring", "down", "lost steps")
"""Parts that do not grow with the steps of a run."""
_SLOWER = 1.2
"""A run is called slow if a step takes that many times as long as in the fastest."""


class Finding(NamedTuple):
    """A sentence.

    Attributes:
        text: of it.
        run: the index of the run that it is about; None for all.
    """

    text: str
    run: int | None = None


def list_findings(runs: Sequence[Run]) -> list[Finding]:
    """Return what stands out in several runs, or what one took."""
    findings = []
    if len(runs) > 1:
        findings += [*_find_best(runs), *_find_slowest(runs)]
    return [*findings, *_add_up_cost(runs)]


def _find_best(runs: Sequence[Run]) -> list[Finding]:
    """Return the best value of each metric that several runs choose their checkpoints by."""
    by_monitor = defaultdict(list)
    for index, run in enumerate(runs):
        monitor = run.monitor
        curve = run.curves.get(monitor[0]) if monitor is not None else None
        best = None if curve is None or monitor is None else curve.find_best(monitor[1])
        if best is not None:
            by_monitor[monitor].append((best[1], index, best[0]))
    findings = []
    for monitor, values in by_monitor.items():
        if len(values) < 2:
            continue
        choose = min if monitor[1] == "min" else max
        value, index, step = choose(values, key=lambda best: best[0])
        text = f"best {as_printable(monitor[0])}: {format_number(value)} at step {step:,}"
        findings.append(Finding(f"{text}, {runs[index].name}", index))
    return findings


def _find_slowest(runs: Sequence[Run]) -> list[Finding]:
    """Return which run takes the longest for a step, and what of it the fastest does not take."""
    per_step = {}
    for index, run in enumerate(runs):
        recorded, step = find_recorded(run)
        parts = {part: spent for part, spent in recorded.items() if part not in _ONCE}
        num_steps = step - run.start_step
        if parts and num_steps > 0:
            per_step[index] = {part: spent / num_steps for part, spent in parts.items()}
    if len(per_step) < 2:
        return []
    totals = {index: sum(parts.values()) for index, parts in per_step.items()}
    slowest = max(totals, key=lambda index: totals[index])
    fastest = min(totals, key=lambda index: totals[index])
    if totals[slowest] < _SLOWER * totals[fastest]:
        return []
    others = per_step[fastest]
    excess = {part: spent - others.get(part, 0.0) for part, spent in per_step[slowest].items()}
    part = max(excess, key=lambda name: excess[name])
    text = (
        f"slowest: {runs[slowest].name}, {format_seconds(totals[slowest])} a step, of which "
        f"{format_seconds(per_step[slowest][part])} {_as_activity(part)}; "
        f"{runs[fastest].name} takes {format_seconds(totals[fastest])}, of which "
        f"{format_seconds(others.get(part, 0.0))} {_as_activity(part)} "
        "(without starting and compiling)"
    )
    return [Finding(text, slowest)]


def _as_activity(part: str) -> str:
    """Return a part as what time was spent on."""
    return "training" if part == "steps" else as_printable(part)


def _add_up_cost(runs: Sequence[Run]) -> list[Finding]:
    """Return the run time of all runs, and on how many devices."""
    by_devices: dict[str, float] = defaultdict(float)
    for run in runs:
        devices = run.manifest.get("devices")
        devices = devices if isinstance(devices, dict) else {}
        label = f"{devices.get('count', '?')} x {devices.get('kind', 'unknown device')}"
        by_devices[as_printable(label)] += find_seconds(run)
    costs = [
        f"{format_seconds(spent)} of run time on {label}"
        for label, spent in by_devices.items()
        if spent
    ]
    return [Finding(f"cost: {', '.join(costs)}")] if costs else []
