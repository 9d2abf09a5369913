"""The plugin and what it writes: one directory of event files for each source of records."""

import os
import re
import shutil
import time
import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite_logging import FileLogger, LogBackend
from fulgurite_runs.directory import sync_folder

if TYPE_CHECKING:
    from fulgurite_tensorboard.events import EventFile

FOLDER = "tensorboard"
_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.fulgurite")
_SET_ASIDE = re.compile(r"set-aside\.([0-9]{10})")
_SPLIT = re.compile(r"(?!\.)[\w.=+%-]{1,100}")
_TELEMETRY = "telemetry="


@dataclass(eq=False)
class TensorBoardLogger(FileLogger):
    """Writes scalars, pictures, histograms, figures, text and configuration into `RUN/tensorboard`,
    a directory of
    event files for each source: `train`, an evaluator's name. `tensorboard --logdir
        RUN/tensorboard` shows them.

    Each record of the exact stream is there once: a resumed run cuts the files back to its
    checkpoint, sets the contents of later files aside, and begins a new file with a
    `SessionLog.START` event, so a running server drops what it has read of later steps. Telemetry
    goes to separate directories, `telemetry=train`, and may appear more than once. A value that
    cannot be shown, such as a figure that fails to draw, is left out with one notice.
    """

    plugin_name = FOLDER

    def open_backend(self, run: fg.Run, position: Any) -> LogBackend:
        """What writes the event files."""
        assert run.run_dir is not None
        folder = run.run_dir.path / FOLDER
        whole = _checked(position)
        if (
            run.step == run.step_range.start > 0 and position is None
        ):  # from the state that the former fit left
            whole = {split: _up_to(run.step, folder / split) for split in _exact_splits(folder)}
        return _Backend(folder, whole, run.step)

    @fg.hookimpl
    def log_media(self, record: fg.Record) -> None:
        """Has the record written."""
        self.put(record)

    @fg.hookimpl
    def log_text(self, record: fg.Record) -> None:
        """Has the record written."""
        self.put(record)

    @fg.hookimpl
    def log_config(self, record: fg.Record) -> None:
        """Has the record written."""
        self.put(record)


class _Backend:
    """The files of the exact stream have numbers; `position` tells the size of each, by split."""

    def __init__(self, folder: Path, whole: dict[str, dict[str, int]], step: int) -> None:
        self._folder, self._open, self._whole = folder, dict[str, "EventFile"](), whole
        self._refused = set[str]()
        folder.mkdir(exist_ok=True)
        for split in ("", *_exact_splits(folder)):
            _set_aside(folder / split, whole.get(split, {}))
        from fulgurite_tensorboard.events import started

        for split, files in whole.items():
            for name, size in files.items():
                _cut(folder / split / name, size)
            self._file(split).append(started(step + 1))

    def write(self, record: fg.Record) -> None:
        from fulgurite_tensorboard.events import recorded
        from fulgurite_tensorboard.summaries import hyperparameters, summary_of

        wall = record.wall_time or time.time()
        if (start := hyperparameters(record)) is not None:
            # Beside the splits, because they belong to what is in directories below them.
            self._file("").append(recorded(record.step, wall, start))
        summary = summary_of(record, partial(self._refuse, record))
        self._file(split_of(record)).append(recorded(record.step, wall, summary))

    def sync(self) -> None:
        for file in self._open.values():
            file.sync()

    def get_position(self) -> Any:
        now = {split: {file.path.name: file.size} for split, file in self._open.items()}
        splits = sorted(one for one in self._whole.keys() | now.keys() if _is_exact(one))
        return {split: self._whole.get(split, {}) | now.get(split, {}) for split in splits}

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def _refuse(self, record: fg.Record, name: str, error: Exception) -> None:
        """Says once that a value is not shown."""
        where = f"{record.source}/{name}"
        if where not in self._refused:
            self._refused.add(where)
            why = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"tensorboard leaves {where!r} out, of step {record.step} first: {why}",
                stacklevel=2,
            )

    def _file(self, split: str) -> "EventFile":
        """This attempt's file of a split."""
        from fulgurite_tensorboard.events import EventFile, started

        if split not in self._open:
            folder = self._folder / split
            folder.mkdir(exist_ok=True)
            names = [path.name for path in folder.iterdir()]
            numbers = [
                int(match[1])
                for name in names
                if (match := _FILE.fullmatch(name) or _SET_ASIDE.fullmatch(name))
            ]
            name = f"events.out.tfevents.{max(numbers, default=0) + 1:010d}.fulgurite"
            self._open[split] = EventFile(folder / name)
            if split not in self._whole and _is_exact(split):
                # TensorBoard's reader in Python takes the first START of a run for its begin, and
                # no later one.
                self._open[split].append(started(0))
        return self._open[split]


def split_of(record: fg.Record) -> str:
    """The directory that a record is written to: another one for each source."""
    name = re.sub(r"[^\w.+-]|^\.", _escaped, record.source) or "%"
    if len(name.encode()) > 80:
        name = f"{name[:40]}%{zlib.crc32(name.encode()):08x}"
    return name if record.stream == "exact" else _TELEMETRY + name


def _escaped(odd: re.Match[str]) -> str:
    return "%2E" if odd[0] == "." else quote(odd[0], safe="", errors="surrogatepass")


def _checked(position: Any) -> dict[str, dict[str, int]]:
    """A position, whose names are ours and no paths."""
    if position is None:
        return {}
    if isinstance(position, dict):
        splits = {split: files for split, files in position.items() if isinstance(files, dict)}
        names = all(
            _SPLIT.fullmatch(split) and all(map(_FILE.fullmatch, files))
            for split, files in splits.items()
        )
        sizes = all(
            type(size) is int and size >= 0 for files in splits.values() for size in files.values()
        )
        if len(splits) == len(position) and names and sizes:
            return splits
    raise CheckpointError(
        f"the checkpoint's position of the TensorBoard log is none: {str(position)[:200]}"
    )


def _is_exact(split: str) -> bool:
    return split != "" and not split.startswith(_TELEMETRY)


def _exact_splits(folder: Path) -> list[str]:
    """The directories of the exact stream that are there."""
    found = [path for path in folder.glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(path.name for path in found if _is_exact(path.name))


def _up_to(step: int, folder: Path) -> dict[str, int]:
    """The sizes of the event files in `folder` up to the records of `step`."""
    from fulgurite_tensorboard.events import read_events

    sizes = dict[str, int]()
    for path in sorted(
        path for path in folder.iterdir() if _FILE.fullmatch(path.name) and not path.is_symlink()
    ):
        whole = takewhile(lambda read: read[1].step <= step, read_events(path))
        sizes[path.name] = max((end for end, _ in whole), default=0)
    return sizes


def _set_aside(folder: Path, known: dict[str, int]) -> None:
    """Moves what is in event files that are not `known` to files that TensorBoard does not see.
    They stay, empty, for a
    server that reads them: it would stop where one is gone."""
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None or path.name in known or path.is_symlink() or not path.stat().st_size:
            continue
        aside = folder / f"set-aside.{match[1]}"
        aside.unlink(missing_ok=True)  # what was copied of it before a kill
        with open(path, "rb") as whole, open(aside, "xb") as copy:
            shutil.copyfileobj(whole, copy)
            copy.flush()
            os.fsync(copy.fileno())
        sync_folder(folder)
        os.truncate(path, 0)


def _cut(path: Path, size: int) -> None:
    from fulgurite_tensorboard.events import cut

    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path} is missing, which the checkpoint knows: put it back")
    cut(path, size)
