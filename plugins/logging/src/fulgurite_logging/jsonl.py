"""Write records as lines of JSON."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite_runs import check_json_memory, dumps, loads

from fulgurite_logging.file_logger import FileLogger
from fulgurite_logging.files import (
    LONGEST_LINE,
    LineFile,
    UnreadableLineError,
    UnreadableRecords,
    check_cut,
    get_entry,
)
from fulgurite_logging.writer import LogBackend

EXACT_FILE = "records.jsonl"
TELEMETRY_FILE = "telemetry.jsonl"


@dataclass(eq=False)
class JSONLLogger(FileLogger):
    """Write scalars, text and configuration into the run's directory, one line of JSON per record.

    `records.jsonl` holds the exact stream: `{"kind", "source", "step", "values"}`, its bytes depend
    only on the records; a resumed run continues where its checkpoint was, so each record is there
    once. `telemetry.jsonl` holds the rest, with `attempt` and `wall_time` (seconds since 1970); it
    only grows. `fulgurite_runs.loads` reads a line. A record of more than 16 MiB, or of millions of
    numbers, is left out with one warning: the file could not be read with it.

    Example:
        from fulgurite_logging import JSONLLogger

        # Or by name: plugins=["jsonl"].
        engine = fg.Engine(steps=100, run_dir="runs/digits", plugins=[JSONLLogger()])
    """

    plugin_name = "jsonl"
    kinds = ("scalars", "text", "config")

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        assert run.run_dir is not None
        return JSONLBackend(run.run_dir.path, position)

    def check_position(self, folder: Path, position: Any, step: int | None) -> None:
        check_cut(folder / EXACT_FILE, get_entry(position, EXACT_FILE), step, _get_step)


def _get_step(line: bytes) -> int | None:
    try:
        step = loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


class JSONLBackend:
    """The two files of `JSONLLogger` in a folder.

    Example:
        from pathlib import Path

        from fulgurite_logging import JSONLBackend

        backend = JSONLBackend(Path(), None)
        backend.write(fg.Record("scalars", "train", 10, {"loss": 0.5}))
        backend.close()

    Args:
        folder: where they are.
        position: what `get_position` returned, to which the exact file is cut back; None to keep
            what is there.
    """

    def __init__(self, folder: Path, position: Any) -> None:
        self._unreadable = UnreadableRecords("jsonl")
        with ExitStack() as stack:
            self._exact = LineFile(folder / EXACT_FILE)
            stack.callback(self._exact.close)
            self._telemetry = LineFile(folder / TELEMETRY_FILE)
            stack.callback(self._telemetry.close)
            if position is None:
                self._exact.repair()
            else:
                self._exact.rewind(get_entry(position, EXACT_FILE))
            self._telemetry.repair()
            stack.pop_all()

    def write(self, record: fg.Record) -> None:
        line = {
            "kind": record.kind,
            "source": record.source,
            "step": record.step,
            "values": record.values,
        }
        file = self._exact
        if record.stream == "telemetry":
            line |= {"attempt": record.attempt, "wall_time": record.wall_time}
            file = self._telemetry
        text = dumps(line, sort_keys=True) + "\n"
        try:
            _check_readable(text)
        except UnreadableLineError as error:
            self._unreadable.warn(record, error)
        else:
            file.append(text)

    def sync(self) -> None:
        self._exact.sync()
        self._telemetry.sync()

    def get_position(self) -> Any:
        return {EXACT_FILE: self._exact.size}

    def close(self) -> None:
        with ExitStack() as stack:  # the second one is closed, too, where the first one fails
            stack.callback(self._telemetry.close)
            stack.callback(self._exact.close)


def _check_readable(line: str) -> None:
    """Raise `UnreadableLineError` for a line that `loads` would refuse."""
    if 4 * len(line) <= LONGEST_LINE:
        return  # whatever it holds
    data = line.encode("utf-8", "backslashreplace")
    if len(data) > LONGEST_LINE:
        raise UnreadableLineError(
            f"its line has {len(data):,} bytes, and {LONGEST_LINE:,} are the most that can be read "
            "again"
        )
    try:
        check_json_memory(data)
    except ValueError as error:
        raise UnreadableLineError(str(error)) from error
