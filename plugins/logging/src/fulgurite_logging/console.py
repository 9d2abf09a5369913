"""Print records as lines in a terminal or a pipe, or hand them to Python's `logging`."""

import logging
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
from fulgurite.plugins import as_printable, hide_constructor_frames

from fulgurite_logging.arguments import check_names
from fulgurite_logging.writer import BackgroundWriter

RecordFormat = Callable[[fg.Record], str | None]


@hide_constructor_frames
@dataclass(eq=False)
class ConsoleLogger(fg.Plugin):
    """Print a line for each record of exact scalars, and every message, to standard output.

    Example:
        from fulgurite_logging import ConsoleLogger

        engine = fg.Engine(steps=100, plugins=[ConsoleLogger(hide=("loss_average",))])


        def format_loss(record):
            if record.kind == "scalars" and "loss" in record.values:
                return f"{record.step}: {record.values['loss']:.3f}"


        engine = fg.Engine(steps=100, plugins=[ConsoleLogger(format=format_loss)])

    Attributes:
        hide: names of metrics not to show, also as the last part of a name with slashes.
        required: whether training ends when printing fails, such as into a closed pipe.
        format: `format(record)` returns the line for a record of scalars or text, or None for no
            line, instead of this logger's own.
    """

    hide: tuple[str, ...] = ("batch_loss", "loss_average")
    required: bool = False
    format: RecordFormat | None = None
    plugin_name = "console"
    _writer = fg.PerFit[BackgroundWriter | None](lambda: None)

    def __post_init__(self) -> None:
        check_names(self.hide, "ConsoleLogger: hide")

    @fg.hookimpl
    def open_logger(self, run: fg.LoggedRun) -> None:
        """Start a thread that prints, so that training does not wait for a terminal."""
        # It is None where the process was started without standard output.
        if sys.stdout is not None:
            self._writer = BackgroundWriter(
                self.plugin_name, _LineBackend(self.hide, self.format, _print_line)
            )

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Print scalars and text."""
        if self._writer is not None and record.kind in ("scalars", "text"):
            self._writer.put(record)

    @fg.hookimpl
    def close_logger(self) -> None:
        """Wait until everything is printed."""
        if self._writer is not None:
            self._writer.close()


@hide_constructor_frames
@dataclass(eq=False)
class PythonLogger(fg.Plugin):
    """Hand a line for each record of exact scalars, and every message, to Python's `logging`.

    They are those of `ConsoleLogger`. Where they go, the program says by `logging.basicConfig` or a
    handler.

    Example:
        import logging

        from fulgurite_logging import PythonLogger

        logging.basicConfig(level=logging.INFO)
        engine = fg.Engine(steps=100, plugins=[PythonLogger("my_project")])

    Attributes:
        name: of the logger in `logging`.
        level: of the lines of scalars; those of messages are warnings.
        hide: as of `ConsoleLogger`.
        format: as of `ConsoleLogger`.
    """

    name: str = "fulgurite"
    level: int = logging.INFO
    hide: tuple[str, ...] = ("batch_loss", "loss_average")
    format: RecordFormat | None = None
    plugin_name = "python"
    _backend = fg.PerFit["_LineBackend | None"](lambda: None)

    def __post_init__(self) -> None:
        check_names(self.hide, "PythonLogger: hide")

    @fg.hookimpl
    def open_logger(self, run: fg.LoggedRun) -> None:
        """Begin with no rate known."""
        self._backend = _LineBackend(self.hide, self.format, self._log_line)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Log scalars and text."""
        if self._backend is not None and record.kind in ("scalars", "text"):
            self._backend.write(record)

    def _log_line(self, record: fg.Record, line: str) -> None:
        level = logging.WARNING if record.kind == "text" else self.level
        logging.getLogger(self.name).log(level, "%s", line)


class _LineBackend:
    """Turns records into lines.

    Args:
        hide: names of metrics not to show.
        format_record: `format` of the logger, instead of the lines of this class.
        write_line: takes a record and its line.
    """

    def __init__(
        self,
        hide: Iterable[str],
        format_record: RecordFormat | None,
        write_line: Callable[[fg.Record, str], None],
    ) -> None:
        self._hide = frozenset(hide)
        self._format_record = format_record or self._format_default
        self._write_line = write_line
        self._rates: dict[str, float] = {}

    def write(self, record: fg.Record) -> None:
        line = self._format_record(record)
        if line is not None:
            self._write_line(record, line)

    def _format_default(self, record: fg.Record) -> str | None:
        values = {
            name: value
            for name, value in record.values.items()
            # `batch_loss` of each phase is `PHASE/batch_loss`.
            if name.rpartition("/")[2] not in self._hide and name not in self._hide
        }
        if record.kind == "text":
            if "message" not in values:
                return None
            return f"step {record.step:>7}  note: {values['message']}"
        if record.stream == "exact":
            cells = [f"{name} {format_number(value)}" for name, value in values.items()]
            rate = self._rates.get(record.source)
            if rate is not None:
                cells.append(f"{format_number(rate)} steps/s")
            return f"step {record.step:>7}  {record.source}  {'  '.join(cells)}"
        if "steps_per_second" in values:
            self._rates[record.source] = values["steps_per_second"]
        return None

    def sync(self) -> None:
        sys.stdout.flush()

    def get_position(self) -> None:
        return None

    def close(self) -> None:
        sys.stdout.flush()


def _print_line(record: fg.Record, line: str) -> None:
    print(as_printable(line), flush=True)


def format_number(value: Any) -> str:
    """Return a number in about four digits, and an array as its shape."""
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return f"array{list(getattr(value, 'shape', ()))}"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:,.1f}" if 10 <= abs(value) < 1e6 else f"{value:.3e}"
