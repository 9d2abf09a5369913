"""Hand records to wandb. All of it runs on the writer's thread."""

import errno
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite_logging import LONGEST_LINE
from fulgurite_runs import dumps, loads

from fulgurite_wandb.runfile import find_last_step
from fulgurite_wandb.values import convert_value

_CONNECTING = threading.Lock()
"""Held while a logger begins its run, so that no other logger takes it for its own."""


@dataclass(frozen=True)
class ResumePoint:
    """What a resumed run continues from.

    Attributes:
        step: its step.
        records: its `records.jsonl`, or None.
        size: how many bytes of that file belong to it; the writer of the file may append to it at
            any time.
    """

    step: int
    records: Path | None
    size: int


class Backend:
    """A run at Weights & Biases.

    Which steps have arrived is looked up where they arrive, at the server or in the run's files,
    and not noted: a kill loses the last rows that were handed to wandb.

    Attributes:
        exit_code: that of the program, as wandb is told at the end: 0 for a run that finished.

    Args:
        settings: arguments of `wandb.init`.
        mode: `online` or `offline`.
        folder: where wandb's files go.
        timeout: seconds that a connection may take before the run continues offline.
        resume_point: what a resumed run continues from; None for a new run.
        check_lock: raises if this process may not write to the folder any more.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        mode: Any,
        folder: Path,
        timeout: float,
        resume_point: ResumePoint | None,
        check_lock: Callable[[], None],
    ) -> None:
        self.exit_code = 0
        self._settings = settings
        self._mode = mode
        self._folder = folder
        self._timeout = timeout
        self._resume_point = resume_point
        self._check_lock = check_lock
        self._run: Any = None
        self._last_arrived_step = -1
        # The row of one step, which is handed over with the first record of the next step.
        self._row: dict[str, Any] = {}
        self._row_step = -1
        self._refused_names: set[str] = set()

    @property
    def is_connected(self) -> bool:
        """Whether the run has begun, at the server or here."""
        return self._run is not None

    @property
    def sync_dir(self) -> str:
        """Where wandb keeps the run until it is sent."""
        return str(self._folder / "wandb") if self._run is None else self._run.settings.sync_dir

    def write(self, record: fg.Record) -> None:
        """Take one record; those of one step become one row."""
        if self._run is None:
            self._start_run()
        if record.kind == "config":
            self._update_config(record)
        elif record.step > self._last_arrived_step:
            self._add_to_row(record)

    def sync(self) -> None:
        """Do nothing: wandb cannot be asked to make anything durable."""

    def get_position(self) -> None:
        """Return None: what wandb has received cannot be taken back."""

    def close(self) -> None:
        """Hand over the last row and end the run."""
        if self._run is None:
            return
        try:
            # The row may hold media, which become files.
            self._check_lock()
            self._hand_over_row()
        finally:
            self._run.finish(exit_code=self.exit_code)

    def _start_run(self) -> None:
        """Connect, and send what is missing up to the checkpoint that the run resumes from."""
        # Otherwise wandb measures itself for its makers, which takes a third of the time of a row.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # The address of wandb's own process, if a parent of this program had started one; it may
        # be gone.
        os.environ.pop("WANDB_SERVICE", None)
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier_files: list[Path] = []
        if self._resume_point is not None:
            earlier_files = sorted(
                self._folder.glob(f"wandb/*run-*-{self._settings['id']}/*.wandb")
            )
        with _CONNECTING, _limit_processor_use():
            self._connect()
        if self._resume_point is not None:
            self._last_arrived_step = self._find_last_arrived_step(earlier_files)
            self._send_missing(self._resume_point)

    def _connect(self) -> None:
        """Begin the run, offline if wandb cannot be reached."""
        import wandb
        from wandb.errors import CommError, UsageError

        quiet_settings = wandb.Settings(
            disable_git=True,
            save_code=False,
            console="off",
            silent=True,
            init_timeout=self._timeout,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        arguments = {
            "dir": str(self._folder),
            "resume": "allow",
            "settings": quiet_settings,
            **self._settings,
        }
        if wandb.setup().most_recent_active_run is not None:
            # A run of the program itself, or of another fit. wandb would return that one.
            arguments = {"reinit": "create_new", **arguments}
        try:
            with _never_prompt(quiet_settings):
                mode: Any = self._mode
                self._run = wandb.init(mode=mode, **arguments)
        except (CommError, UsageError) as error:
            if self._mode == "offline":
                raise
            warnings.warn(
                f"wandb cannot be reached and continues offline: {error}. Later `wandb sync` sends "
                f"what is in {self._folder / 'wandb'}",
                stacklevel=2,
            )
            wandb.teardown()  # otherwise the id would still be in use
            self._mode = "offline"
            self._run = wandb.init(mode="offline", **arguments)

    def _find_last_arrived_step(self, earlier_files: list[Path]) -> int:
        """Return the last step that has arrived; -1 if none has."""
        # Online, only the server knows whether what an earlier online attempt has in its files
        # here was sent; offline, those files will be synchronized as well.
        files = [
            file
            for file in earlier_files
            if self._mode == "offline" or file.parent.name.startswith("offline-")
        ]
        last_step = max(map(find_last_step, files), default=-1)
        if self._mode == "online":
            last_step = max(last_step, self._run.starting_step - 1)
        return last_step

    def _send_missing(self, resume_point: ResumePoint) -> None:
        """Send the records between the last step that arrived and the checkpoint."""
        if resume_point.records is None or resume_point.size == 0:
            if self._last_arrived_step < resume_point.step:
                warnings.warn(
                    f"wandb has the steps up to {max(self._last_arrived_step, 0)} of "
                    f"{resume_point.step} and there is no records.jsonl with the rest: add the "
                    "plugin 'jsonl' of fulgurite-logging",
                    stacklevel=2,
                )
            return
        for record in _iter_records(resume_point.records, resume_point.size):
            if self._last_arrived_step < record.step <= resume_point.step:
                self._add_to_row(record)

    def _add_to_row(self, record: fg.Record) -> None:
        if record.step != self._row_step:
            self._hand_over_row()
            self._row_step = record.step
        if record.kind == "media" and self._run is not None:
            # wandb names the files of pictures after the step that it knows, which is that of the
            # row before.
            self._run.log({}, step=record.step)
        for name, value in record.values.items():
            full_name = f"{record.source}/{name}"
            try:
                if record.kind == "text":
                    self._add_text(full_name, str(value))
                else:
                    self._row.update(convert_value(full_name, value))
            # Any exception, because a figure's code is the user's: the rest of the row is shown.
            except Exception as error:
                self._warn_refused(full_name, record.step, error)

    def _add_text(self, name: str, text: str) -> None:
        """Add a text to the row: of several messages of a step, each is a line of one table."""
        import wandb

        table = self._row.get(name)
        if isinstance(table, wandb.Table):
            table.add_data(text)
        else:
            self._row.update(convert_value(name, text))

    def _warn_refused(self, name: str, step: int, error: Exception) -> None:
        """Warn, once for each name, that a value is not shown."""
        if name in self._refused_names:
            return
        self._refused_names.add(name)
        warnings.warn(
            f"wandb leaves {name!r} out, of step {step} first: {type(error).__name__}: {error}",
            stacklevel=2,
        )

    def _hand_over_row(self) -> None:
        row, self._row = self._row, {}
        if not row or self._run is None:
            return
        try:
            self._run.log(row, step=self._row_step)
        except (ValueError, TypeError, OSError) as error:
            if not _is_refusal(error):
                raise
            self._hand_over_alone(row)

    def _hand_over_alone(self, row: dict[str, Any]) -> None:
        """Hand over each value of a row that wandb refused, and warn of those that are at fault."""
        for name, value in row.items():
            try:
                self._run.log({name: value}, step=self._row_step)
            except (ValueError, TypeError, OSError) as error:
                if not _is_refusal(error):
                    raise
                self._warn_refused(name, self._row_step, error)

    def _update_config(self, record: fg.Record) -> None:
        if record.source == "best":
            best = {f"best/{name}": value for name, value in record.values.items()}
            self._run.summary.update(best)
            return
        values = json.loads(dumps(record.values))
        arguments = values.pop("configuration", None) or {}
        self._run.config.update({**arguments, record.source: values}, allow_val_change=True)


def _is_refusal(error: Exception) -> bool:
    """Return whether wandb refuses a value, such as one whose name its files or artifacts cannot
    have; a full disk or a lost connection is none."""
    return not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG


@contextmanager
def _never_prompt(quiet_settings: Any) -> Iterator[None]:
    """Keep wandb from asking for a key, lest training wait for the answer. The settings that
    `wandb.init` gets do not see to that."""
    import wandb

    global_settings = wandb.setup().settings
    wandb.termsetup(quiet_settings, None)
    try:
        yield
    finally:
        wandb.termsetup(global_settings, None)


@contextmanager
def _limit_processor_use() -> Iterator[None]:
    """Leave the processors to training: wandb's own process, which is written in Go, starts within.

    A row costs it less with one thread at work and rarer collections of garbage. A small step keeps
    two cores busy, so every other program slows it down. A row takes 0.5 ms of wandb's Python and
    0.4 ms of its Go. A process of our own around wandb would move this work and not save it.
    """
    variables = {
        name: value
        for name, value in {"GOMAXPROCS": "1", "GOGC": "400"}.items()
        if name not in os.environ
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _iter_records(path: Path, size: int) -> Iterator[fg.Record]:
    """Yield the records of scalars and text in the first `size` bytes of a file of JSON lines.

    Raises:
        CheckpointError: a line is not a record.
    """
    with open(path, "rb") as file:
        number = 0
        while size > 0:
            number += 1
            line = file.readline(min(size, LONGEST_LINE))
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                return
            size -= len(line)
            try:
                record = _parse_record(line)
            except (ValueError, TypeError, LookupError) as error:
                raise CheckpointError(
                    f"{path}, line {number}: no record, which wandb lacks: {error}"
                ) from error
            if record.kind in ("scalars", "text"):
                yield record


def _parse_record(line: bytes) -> fg.Record:
    """Return the record in a line.

    Raises:
        ValueError, TypeError, LookupError: the line is something else.
    """
    if not line.endswith(b"\n"):
        raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
    values = loads(line)
    types = {"kind": str, "source": str, "step": int, "values": dict}
    if not all(type(values[name]) is expected for name, expected in types.items()):
        raise ValueError(f"it lacks {', '.join(types)}")
    return fg.Record(values["kind"], values["source"], values["step"], values["values"])
