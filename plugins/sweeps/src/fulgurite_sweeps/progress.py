"""How far a trial is that has not ended, as the records in its run directory tell."""

from dataclasses import replace
from pathlib import Path

from fulgurite_runs import loads

from fulgurite_sweeps.trials import Trial

_TAIL = 1 << 16
"""How many bytes of a trial's records are searched for the newest values."""


def add_progress(trial: Trial, metrics: set[str]) -> Trial:
    """Return a trial with its newest step and values; one that has ended has them already.

    Args:
        trial: of a sweep.
        metrics: as `SOURCE/NAME`.
    """
    if trial.state not in ("running", "stopped"):
        return trial
    step, values = read_progress(trial.run_dir / "records.jsonl", metrics)
    return replace(trial, step=step, metrics=values)


def read_progress(records: Path, metrics: set[str]) -> tuple[int | None, dict[str, float]]:
    """Return the newest step in a file of records, and the newest values of metrics; None and
    nothing if there are no records.

    Args:
        records: the file.
        metrics: as `SOURCE/NAME`.
    """
    step = None
    values: dict[str, float] = {}
    for line in reversed(_read_tail(records)):
        try:
            record = loads(line)
            step = record["step"] if step is None else step
            for name, value in record["values"].items():
                metric = f"{record['source']}/{name}"
                if metric in metrics and type(value) in (int, float):
                    values.setdefault(metric, float(value))
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # the first line of the tail, or the one that is being written
    return step, values


def _read_tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL, 0))
            return file.read().splitlines()
    except OSError:
        return []
