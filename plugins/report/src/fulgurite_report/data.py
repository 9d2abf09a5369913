"""The numbers of a page, as its script reads them."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fulgurite_report.curves import Curve
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable

MOST_POINTS = 400_000
"""How many points a page of up to 8,000 curves holds: at most 16 bytes each in base64."""
MOST_OF_A_CURVE = 2_500
_FEWEST_OF_A_CURVE = 50
_MOST_TIMES = 500
_MEMBER = re.compile(r"\[\d+\]$")


def get_budget(num_curves: int) -> int:
    """Return how many points each curve may have."""
    share = MOST_POINTS // max(num_curves, 1)
    return max(min(share, MOST_OF_A_CURVE), _FEWEST_OF_A_CURVE)


def build_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the runs with their curves, thinned, and their times."""
    budget = get_budget(sum(len(run.curves) for run in runs))
    lone = _find_lone(runs)
    curves = [
        _describe_curve(index, name, curve, budget)
        for index, run in enumerate(runs)
        for name, curve in sorted(
            run.curves.items(), key=lambda item: get_rank(get_chart_name(item[0]), item[1].stream)
        )
        if get_chart_name(name) not in lone
    ]
    return {
        "runs": [{"name": run.name, "times": _describe_times(run)} for run in runs],
        "curves": curves,
    }


def encode_data(value: Any) -> str:
    """Return JSON that may stand in a page: nothing in it ends its element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def get_chart_name(name: str) -> str:
    """Return the name of the chart that a curve is in: the members of a population share one."""
    return _MEMBER.sub("", name)


def _find_lone(runs: Sequence[Run]) -> set[str]:
    """Return the charts of telemetry that would have one point a curve, such as the cost of a
    program: a table shows them as well."""
    lone = set()
    crowded = set()
    for run in runs:
        for name, curve in run.curves.items():
            is_lone = curve.stream == "telemetry" and len(curve.steps) == 1
            (lone if is_lone else crowded).add(get_chart_name(name))
    return lone - crowded


def get_rank(name: str, stream: str) -> tuple[bool, bool, bool, str]:
    """Return where a metric stands: exact ones first, and losses first among these.

    Args:
        name: of the metric, `SOURCE/NAME`.
        stream: `exact` or `telemetry`.
    """
    return stream != "exact", not name.endswith("/loss"), not name.endswith("loss"), name


def _describe_curve(run: int, name: str, curve: Curve, budget: int) -> dict[str, Any]:
    steps, values = curve.thin(budget)
    printable = as_printable(name)
    return {
        "run": run,
        "name": printable,
        "chart": get_chart_name(printable),
        "stream": curve.stream,
        "total": len(curve.steps),
        "steps": _encode(steps),
        "values": _encode(values),
    }


def _describe_times(run: Run) -> dict[str, Any] | None:
    """Return the seconds that a run had lived at steps, without the pauses between attempts; None
    if they are not known."""
    if not run.attempts or len(run.times.steps) < 2:
        return None
    steps, walls = run.times.thin(_MOST_TIMES)
    began = np.array([attempt.began for attempt in run.attempts])
    lived = np.array([attempt.seconds for attempt in run.attempts])
    before = np.concatenate([[0.0], np.cumsum(lived)[:-1]])
    index = np.maximum(np.searchsorted(began, walls, side="right") - 1, 0)
    return {"steps": _encode(steps), "seconds": _encode(before[index] + walls - began[index])}


def _encode(numbers: np.ndarray) -> dict[str, str]:
    """Return numbers as base64 of the smallest type that holds them without loss."""
    for dtype in ("<u4", "<f4"):
        with np.errstate(all="ignore"):
            small = numbers.astype(dtype)
            is_same = np.array_equal(small.astype(numbers.dtype), numbers, equal_nan=True)
        if is_same and (dtype == "<f4" or numbers.dtype.kind == "i"):
            return {"type": dtype, "base64": base64.b64encode(small.tobytes()).decode()}
    wide = numbers.astype("<f8")
    return {"type": "<f8", "base64": base64.b64encode(wide.tobytes()).decode()}
