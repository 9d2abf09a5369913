"""A run, as its directory describes it."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite_report.attempts import (
    Attempt,
    is_time,
    list_attempts,
    note_alive,
    read_attempts,
)
from fulgurite_report.checkpoints import Checkpoint, list_checkpoints
from fulgurite_report.curves import Curve, add_values
from fulgurite_report.errors import ReportError
from fulgurite_report.evaluations import EvaluationFiles
from fulgurite_report.lines import GrowingFile
from fulgurite_report.ownership import find_state
from fulgurite_report.text import as_printable

_DIGITS = re.compile(r"([0-9]{1,18})")
_MARKS = ("attempts", "checkpoints", "records.jsonl", "telemetry.jsonl", "lock")
_MOST_MESSAGES = 1000


@dataclass(frozen=True)
class Message:
    """A sentence of a run.

    Attributes:
        attempt: the number of the start of the run; 0 if that is not known, as of an exact record.
        step: at which it came.
        wall_time: seconds since 1970; 0 if that is not known.
        source: who said it.
        text: what.
    """

    attempt: int
    step: int
    wall_time: float
    source: str
    text: str


class Run:
    """What the files of a run say. `refresh` reads what is new in them.

    Nothing is locked or written, and nothing in the files is executed.

    Example:
        from fulgurite_report import Run

        run = Run("runs/a")
        run.refresh()
        print(run.state, run.step)

    Attributes:
        path: the directory of the run.
        name: under which it is shown.
        state: `complete`; `running`; `stopped`, before its planned end; `killed`, if it never
            recorded that it ended; or `new`.
        manifest: what the newest attempt is made of.
        attempts: the attempts of the run, oldest first.
        curves: numbers over steps, by `SOURCE/NAME`.
        times: steps and seconds since 1970 of the telemetry of the newest attempts.
        messages: the newest sentences of the run.
        configs: the newest records of kind `config`, by source.
        texts: the newest texts that are no messages, by `SOURCE/NAME`.
        checkpoints: the complete ones, oldest first.
        num_records: how many records were read.
        num_messages: how many messages are among them.

    Args:
        path: the directory.
        name: under which it is shown.
    """

    def __init__(self, path: str | os.PathLike[str], name: str = "") -> None:
        self.path = Path(path)
        self.name = make_name(name or self.path.absolute().name)
        self.state = "new"
        self.manifest: dict[str, Any] = {}
        self._attempt_number = 0
        self._exact = GrowingFile(self.path / "records.jsonl")
        self._telemetry = GrowingFile(self.path / "telemetry.jsonl")
        self._clear()

    def _clear(self) -> None:
        self.num_records = 0
        self.num_messages = 0
        self.checkpoints: list[Checkpoint] = []
        self.attempts: list[Attempt] = []
        self.curves: dict[str, Curve] = {}
        self.times = Curve("telemetry")
        self.messages: list[Message] = []
        self.configs: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self._evaluations = EvaluationFiles(self.path)

    def refresh(self) -> None:
        """Read what is new; everything, if the run was started again."""
        newest = max(list_attempts(self.path), default=0)
        is_other = newest != self._attempt_number
        if is_other or self._exact.was_replaced() or self._telemetry.was_replaced():
            self._attempt_number = newest
            self._exact.rewind()
            self._telemetry.rewind()
            self._clear()
            self.attempts, self.manifest = read_attempts(self.path)
        self._read(self._exact, "exact")
        self._read(self._telemetry, "telemetry")
        if self._evaluations.read_new():
            self.num_records += 1
            self.curves |= self._evaluations.build_curves()
        del self.messages[:-_MOST_MESSAGES]
        self.checkpoints = list_checkpoints(self.path, self.checkpoints)
        self.state, heartbeat = find_state(self.path)
        self._note_signs(heartbeat)

    def _note_signs(self, heartbeat: float | None) -> None:
        """Note when the attempts were alive, and how far they came, besides their records."""
        if not self.attempts:
            return
        note_alive(self.path, self.attempts[-1])
        # The files of a run that was copied are younger than what they record.
        if self.state == "running":
            self.attempts[-1].note_sign(heartbeat)
        for checkpoint in self.checkpoints:
            for attempt in self.attempts:
                if attempt.number == checkpoint.attempt:
                    attempt.note_sign(checkpoint.wall_time)
                    attempt.note_step(checkpoint.step)

    @property
    def step(self) -> int:
        """The newest step that is known."""
        steps = [curve.steps[-1] for curve in self.curves.values()]
        steps += [checkpoint.step for checkpoint in self.checkpoints[-1:]]
        return max(steps, default=0)

    @property
    def start_step(self) -> int:
        """The step that the run began with: 0, unless it continues another one."""
        return (self.attempts[0].start_step or 0) if self.attempts else 0

    @property
    def planned_steps(self) -> int | None:
        """The number of steps after which the run is to end; None if that is not known."""
        steps = self._get_settings().get("steps")
        return steps if type(steps) is int else None

    @property
    def seconds(self) -> float:
        """The run time: how long the processes of the run are known to have been alive, without the
        pauses between its attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The metric by which the run chooses the best checkpoint, as `SOURCE/NAME`, and `min` or
        `max`; None if there is none."""
        return self.checkpoints[-1].monitor if self.checkpoints else None

    @property
    def problems(self) -> list[str]:
        """What of the files could not be read."""
        problems = [self._exact.problem, self._telemetry.problem, *self._evaluations.problems]
        return [as_printable(problem) for problem in problems if problem]

    def _get_settings(self) -> dict[str, Any]:
        settings = self.manifest.get("settings")
        return settings if isinstance(settings, dict) else {}

    def _read(self, file: GrowingFile, stream: str) -> None:
        for line in file.iter_new():
            self.num_records += 1
            try:
                kind = line["kind"]
                if stream == "telemetry":
                    self._note_time(line)
                if kind == "scalars":
                    add_values(self.curves, line, stream)
                elif kind == "text":
                    self._add_texts(line)
                elif kind == "config":
                    self.configs[str(line["source"])] = dict(line["values"])
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
                file.note_damage(f"no record: {type(error).__name__}: {error}")

    def _note_time(self, line: dict[str, Any]) -> None:
        number = int(line["attempt"])
        wall_time = float(line["wall_time"])
        step = line["step"]
        if not is_time(wall_time):
            raise ValueError(f"its time is {wall_time}")
        self.times.add(step, wall_time)
        attempt = self._get_attempt(number, wall_time)
        if wall_time < attempt.began:
            attempt.began = attempt.last_sign = wall_time
        attempt.note_sign(wall_time)
        if attempt.first_step is None:
            attempt.first_step = step
        attempt.note_step(step)

    def _get_attempt(self, number: int, wall_time: float) -> Attempt:
        for attempt in reversed(self.attempts):
            if attempt.number == number:
                return attempt
        attempt = Attempt(number, wall_time, wall_time)
        self.attempts.append(attempt)
        return attempt

    def _add_texts(self, line: dict[str, Any]) -> None:
        source = as_printable(line["source"])
        for name, text in line["values"].items():
            if name == "message":
                self.num_messages += 1
                self.messages.append(
                    Message(
                        int(line.get("attempt") or 0),
                        int(line["step"]),
                        float(line.get("wall_time") or 0.0),
                        source,
                        as_printable(str(text)),
                    )
                )
            else:
                self.texts[f"{source}/{as_printable(name)}"] = as_printable(str(text))


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Return the runs at the paths: each is the directory of a run, or one that holds runs, such as
    that of a sweep.

    Args:
        paths: directories.

    Raises:
        ReportError: there is no run.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise ReportError(f"there is no directory {path}: give that of a run")
        runs = list_folders(path)
        if not runs and any(path.iterdir()):
            raise ReportError(
                f"{path} is not a run and holds none: give the directory of a run, or one of runs"
            )
        folders += runs or [path]  # of an empty one a run may be made at any moment
    folders = drop_repeated(folders)
    return [Run(folder, name) for folder, name in zip(folders, name_folders(folders), strict=True)]


def list_folders(path: Path) -> list[Path]:
    """Return the directories of the runs at a path: itself, or those in it; none if it is not
    there, or holds none."""
    if is_run(path):
        return [path]
    if not path.is_dir():
        return []
    entries = sorted(path.iterdir(), key=_get_place)
    return [entry for entry in entries if entry.is_dir() and is_run(entry)]


def drop_repeated(folders: Iterable[Path]) -> list[Path]:
    """Return the directories without those that are another one by another name, such as a link to
    the latest run: its time would count twice."""
    places = list(dict.fromkeys(folders))
    place_by_target: dict[Path, Path] = {}
    for place in sorted(places, key=Path.is_symlink):
        place_by_target.setdefault(place.resolve(), place)
    return [place for place in places if place in place_by_target.values()]


def name_folders(folders: Sequence[Path]) -> list[str]:
    """Return under which name the run in each directory is shown: that of the directory, and with
    those above it if two have the same."""
    names = [folder.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def make_name(text: str) -> str:
    """Return a name of a run as it is shown, on one line."""
    return " ".join(as_printable(text).splitlines())


def _get_place(path: Path) -> list[tuple[int, str]]:
    """Return by what directories are sorted: numbers in names by their value."""
    parts = _DIGITS.split(path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def is_run(path: Path) -> bool:
    """Return whether a directory is that of a run."""
    return any((path / name).exists() for name in _MARKS)
