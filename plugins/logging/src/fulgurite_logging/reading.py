"""Reading what `JSONLLogger` has written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from fulgurite_runs import loads

from fulgurite_logging.files import LONGEST_LINE
from fulgurite_logging.jsonl import EXACT_FILE, TELEMETRY_FILE


def iter_records(run: str | Path) -> Iterator[fg.Record]:
    """Yield the exact records of a run, in the order in which they came about.

    Example:
        from fulgurite_logging import JSONLLogger, iter_records

        fg.Engine(steps=100, run_dir="runs/a", plugins=[JSONLLogger()]).fit(model, data)
        for record in iter_records("runs/a"):
            print(record.step, record.source, record.values)

    Args:
        run: the directory of a run, or a file of records.

    Raises:
        ConfigurationError: there are no records, or the file is damaged.
    """
    run = Path(run)
    path = run / EXACT_FILE if run.is_dir() else run
    if not path.is_file():
        raise ConfigurationError(
            f"there is no {path}: give the directory of a run that was logged with 'jsonl'"
        )
    types = {"kind": str, "source": str, "step": int, "values": dict}
    for line in iter_lines(path, "record", types):
        yield fg.Record(line["kind"], line["source"], line["step"], line["values"])


def iter_telemetry(run: str | Path) -> Iterator[fg.Record]:
    """Yield the records of a run that are telemetry, of all its attempts, in the order in which
    they came about: nothing, if there are none.

    Example:
        from fulgurite_logging import JSONLLogger, iter_telemetry

        fg.Engine(steps=100, run_dir="runs/a", plugins=[JSONLLogger()]).fit(model, data)
        for record in iter_telemetry("runs/a"):
            print(record.attempt, record.step, record.source, record.values)

    Args:
        run: the directory of a run.

    Raises:
        ConfigurationError: the file is damaged.
    """
    path = Path(run) / TELEMETRY_FILE
    if not path.is_file():
        return
    types = {"kind": str, "source": str, "step": int, "values": dict}
    for line in iter_lines(path, "record", types):
        yield fg.Record(
            line["kind"],
            line["source"],
            line["step"],
            line["values"],
            "telemetry",
            line.get("attempt"),
            line.get("wall_time"),
        )


def iter_lines(path: Path, item: str, types: dict[str, type]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file as dictionaries.

    A last line that is not whole is left out: a run may be writing it.

    Args:
        path: a file of JSON lines.
        item: what a line holds, for messages.
        types: the types of the members that each line must have.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) < LONGEST_LINE:
                    return
                raise ConfigurationError(f"{path}, line {number}: longer than {LONGEST_LINE} bytes")
            try:
                values = loads(line)
                if not all(type(values[name]) is expected for name, expected in types.items()):
                    raise ValueError(f"it lacks {', '.join(types)}")
                if not 0 <= values.get("step", 0) < 2**63:
                    raise ValueError("its step is none that a run could reach")
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ConfigurationError(f"{path}, line {number}: no {item}: {error}") from error
            yield values
