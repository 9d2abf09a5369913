"""Write records for TensorBoard: one directory of event files for each source of records."""

import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import fulgurite as fg
from fulgurite.errors import CheckpointError, ConfigurationError, check_callable, did_you_mean
from fulgurite.plugins import hide_constructor_frames, hint_at_class_arguments
from fulgurite_logging import FileLogger, LogBackend
from fulgurite_runs import sync_folder

if TYPE_CHECKING:
    from fulgurite_tensorboard.events import EventFile

Layout = Callable[[str, str], tuple[str, str]]

FOLDER = "tensorboard"
_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.fulgurite")
_SET_ASIDE = re.compile(r"set-aside\.([0-9]{10})")
_SPLIT = re.compile(r"(?!\.)[\w.=+%-]{1,100}")
_TELEMETRY = "telemetry="


@hide_constructor_frames
@hint_at_class_arguments(
    {
        "keys": "give sources=, the directories that there may be",
        "allow_new_keys": "leave sources= out, and any directory may be new",
        "auto_flush": "each record reaches the operating system at once",
        "tag_to_key": "give layout=, a function of source and name",
        "dirname": "give layout=, a function of source and name",
    }
)
@dataclass(eq=False)
class TensorBoardLogger(FileLogger):
    """Write scalars, pictures, histograms, figures, text and configuration for TensorBoard.

    They go to `RUN/tensorboard`, a directory of event files for each source: `train`, an
    evaluator's name. `tensorboard --logdir RUN/tensorboard` shows them.

    Each record of the exact stream is there once: a resumed run cuts the files back to its
    checkpoint, sets the contents of later files aside, and begins a new file with a
    `SessionLog.START` event, so a running server drops what it has read of later steps. Telemetry
    goes to separate directories, `telemetry=train`, and may appear more than once. A value that
    cannot be shown, such as a figure that fails to draw, is left out with one warning.

    Example:
        from fulgurite_tensorboard import TensorBoardLogger

        engine = fg.Engine(steps=1000, run_dir="runs/digits", plugins=[TensorBoardLogger()])


        def draw_losses_together(source, name):  # one chart for `generator/loss` and `critic/loss`
            part, _, rest = name.partition("/")
            return (f"{source}-{part}", rest) if rest else (source, name)


        logger = TensorBoardLogger(layout=draw_losses_together)

    Attributes:
        layout: `layout(source, name)` returns the directory and the tag of a value; TensorBoard
            draws tags of the same name into one chart. By default these are source and name.
        sources: the directories of numbers and media that there may be; None for any. A value for
            another one, such as a misspelled one of `layout`, is left out with one warning.
    """

    plugin_name = FOLDER
    kinds = ("scalars", "media", "text", "config")
    layout: Layout | None = None
    sources: Collection[str] | None = None

    def __post_init__(self) -> None:
        check_sources(self.sources, "TensorBoardLogger")
        if self.layout is not None:
            check_callable(self.layout, "TensorBoardLogger: layout")

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        """Return what writes the event files."""
        assert run.run_dir is not None
        folder = run.run_dir.path / FOLDER
        sizes = _check_position(position)
        # Without a position the run continues from the state that an earlier fit left here.
        continues_state = run.step == run.step_range.start > 0
        if position is None and continues_state:
            sizes = {
                split: _measure_files(folder / split, run.step) for split in _list_splits(folder)
            }
        return _Backend(folder, sizes, run.step, self.layout, self.sources)

    def check_position(self, folder: Path, position: Any, step: int | None) -> None:
        for split, sizes in _check_position(position).items():
            for name, size in sizes.items():
                path = folder / FOLDER / split / name
                if not path.is_file() or path.stat().st_size < size:
                    raise CheckpointError(
                        f"{path} lacks what the checkpoint knows, which are {size} bytes: put it "
                        "back, or resume in another directory"
                    )


class _Backend:
    """Writes event files; a directory of them is a *split*, in TensorBoard's own word.

    The files of a split have numbers: each attempt begins a new one. The position is the size of
    each file of the exact stream, by split and name.

    Args:
        folder: where the splits are.
        sizes: the position to continue from; other files are set aside.
        step: the step to continue from.
        layout: that of the logger.
        sources: those of the logger.
    """

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, dict[str, int]],
        step: int,
        layout: Layout | None,
        sources: Collection[str] | None,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._sources = sources
        self._files: dict[str, EventFile] = {}
        self._earlier_sizes = sizes
        self._refused_names: set[str] = set()
        folder.mkdir(exist_ok=True)
        for split in ("", *_list_splits(folder)):
            _set_aside(folder / split, sizes.get(split, {}))
        try:
            self._continue_files(step)
        except BaseException:
            self.close()
            raise

    def write(self, record: fg.Record) -> None:
        from fulgurite_tensorboard.events import build_summary_event
        from fulgurite_tensorboard.summaries import build_hyperparameters, build_summary

        wall_time = record.wall_time or time.time()
        hyperparameters = build_hyperparameters(record)
        if hyperparameters is not None:
            # In the folder of the splits, because TensorBoard compares what is below it.
            event = build_summary_event(record.step, wall_time, hyperparameters)
            self._get_file("").append(event)
        for part in self._divide(record):
            if not self._accepts(part):
                continue
            summary = build_summary(part, partial(self._refuse, part))
            event = build_summary_event(record.step, wall_time, summary)
            self._get_file(get_split(part)).append(event)

    def sync(self) -> None:
        for split, sizes in self._earlier_sizes.items():
            for name in sizes:
                _check_file(self._folder / split / name)
        for file in self._files.values():
            file.sync()

    def get_position(self) -> Any:
        sizes = {split: {file.path.name: file.size} for split, file in self._files.items()}
        return {
            split: self._earlier_sizes.get(split, {}) | sizes.get(split, {})
            for split in sorted(self._earlier_sizes.keys() | sizes.keys())
            if _is_exact(split)
        }

    def close(self) -> None:
        with ExitStack() as stack:  # the others are closed, too, where one fails
            for file in self._files.values():
                stack.callback(file.close)

    def _continue_files(self, step: int) -> None:
        """Cut the earlier files back, and begin a file behind those of each split.

        Args:
            step: the step to continue from.
        """
        # Imported here, on the writer's thread or in a fit: TensorBoard takes its time.
        from fulgurite_tensorboard.events import build_start_event

        for split, files in self._earlier_sizes.items():
            for name, size in files.items():
                _truncate(self._folder / split / name, size)
            self._get_file(split).append(build_start_event(step + 1))

    def _divide(self, record: fg.Record) -> list[fg.Record]:
        """Return the parts of a record that go to different directories."""
        if self._layout is None or record.kind == "config":
            return [record]
        values: dict[str, dict[str, Any]] = {}
        for name, value in record.values.items():
            try:
                directory, tag = _check_place(self._layout(record.source, name))
            # Any exception, because the function is the user's: the rest of the record is shown.
            except Exception as error:
                self._refuse(record, name, error)
            else:
                values.setdefault(directory, {})[tag] = value
        return [
            replace(record, source=directory, values=part) for directory, part in values.items()
        ]

    def _accepts(self, record: fg.Record) -> bool:
        """Return whether the directory of a record may be; warn of its values if not."""
        if record.kind not in ("scalars", "media"):  # configuration and texts describe the run
            return True
        error = find_source_error(record.source, self._sources)
        if error is None:
            return True
        for name in record.values:
            self._refuse(record, name, error)
        return False

    def _refuse(self, record: fg.Record, name: str, error: Exception) -> None:
        """Warn, once for each name, that a value is not shown."""
        full_name = f"{record.source}/{name}"
        if full_name in self._refused_names:
            return
        self._refused_names.add(full_name)
        warnings.warn(
            f"tensorboard leaves {full_name!r} out, of step {record.step} first: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )

    def _get_file(self, split: str) -> "EventFile":
        """Return this attempt's file of a split, which is created when it is first needed."""
        from fulgurite_tensorboard.events import EventFile, build_start_event

        if split not in self._files:
            folder = self._folder / split
            folder.mkdir(exist_ok=True)
            self._files[split] = EventFile(folder / get_next_name(folder))
            if split not in self._earlier_sizes and _is_exact(split):
                # TensorBoard's reader in Python takes the first START of a run for its begin, and
                # no later one.
                self._files[split].append(build_start_event(0))
        return self._files[split]


def _check_place(place: Any) -> tuple[str, str]:
    """Return what `layout` has returned, or raise a `ConfigurationError`."""
    is_pair = isinstance(place, tuple | list) and len(place) == 2
    if not is_pair or not all(isinstance(name, str) for name in place):
        raise ConfigurationError(
            f"layout returned {place!r:.100}; it must return two strings, a directory and a tag"
        )
    return place[0], place[1]


def check_sources(sources: Any, where: str) -> None:
    """Raise a `ConfigurationError` unless there are names, or None.

    Args:
        sources: to check.
        where: whose argument it is.
    """
    is_collection = isinstance(sources, Collection) and not isinstance(sources, str | bytes)
    if sources is None or (is_collection and all(isinstance(name, str) for name in sources)):
        return
    raise ConfigurationError(f"{where}: sources is {sources!r}; give a tuple of names")


def find_source_error(source: str, sources: Collection[str] | None) -> ConfigurationError | None:
    """Return what is wrong with a source; None if it is one of those that there may be.

    Args:
        source: the source.
        sources: those that there may be; None for any.
    """
    if sources is None or source in sources:
        return None
    return ConfigurationError(f"there is no source {source!r}. {did_you_mean(source, sources)}")


def get_next_name(folder: Path) -> str:
    """Return the name of a new event file, behind those of all files that are or were there."""
    last_number = 0
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name) or _SET_ASIDE.fullmatch(path.name)
        if match is not None:
            last_number = max(last_number, int(match[1]))
    return f"events.out.tfevents.{last_number + 1:010d}.fulgurite"


def get_split(record: fg.Record) -> str:
    """Return the name of the directory that a record is written to, a different one for each
    source."""
    name = re.sub(r"[^\w.+-]|^\.", _escape_character, record.source) or "%"
    if len(name.encode()) > 80:
        name = f"{name[:40]}%{zlib.crc32(name.encode()):08x}"
    return name if record.stream == "exact" else _TELEMETRY + name


def _escape_character(match: re.Match[str]) -> str:
    character = match[0]
    return "%2E" if character == "." else quote(character, safe="", errors="surrogatepass")


def _check_position(position: Any) -> dict[str, dict[str, int]]:
    """Return a position from a checkpoint, or raise an error if it is not one that this plugin
    writes: names in it become paths."""
    if position is None:
        return {}
    if isinstance(position, dict) and all(map(_is_valid_split, position, position.values())):
        return position
    raise CheckpointError(
        "the checkpoint's position of the TensorBoard log is not one that this plugin writes: "
        f"{str(position)[:200]}"
    )


def _is_valid_split(split: str, files: Any) -> bool:
    return (
        _SPLIT.fullmatch(split) is not None
        and isinstance(files, dict)
        and all(_FILE.fullmatch(name) for name in files)
        and all(type(size) is int and size >= 0 for size in files.values())
    )


def _is_exact(split: str) -> bool:
    return split != "" and not split.startswith(_TELEMETRY)


def _list_splits(folder: Path) -> list[str]:
    """Return the names of the directories of the exact stream in `folder`."""
    folders = [path for path in folder.glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(path.name for path in folders if _is_exact(path.name))


def _measure_files(folder: Path, last_step: int) -> dict[str, int]:
    """Return the sizes, by name, of the event files in `folder` up to the events of
    `last_step`."""
    from fulgurite_tensorboard.events import read_events

    sizes = {}
    for path in sorted(folder.iterdir()):
        if not _FILE.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        sizes[path.name] = 0
        for end, event in read_events(path):
            if event.step > last_step:
                break
            sizes[path.name] = end
    return sizes


def _set_aside(folder: Path, known: dict[str, int]) -> None:
    """Move the contents of event files that are not `known` to files that TensorBoard does not see.

    The event files stay, empty, for a server that reads them: it would stop where one is gone.
    """
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None or path.name in known or path.is_symlink() or not path.stat().st_size:
            continue
        copy_path = folder / f"set-aside.{match[1]}"
        copy_path.unlink(missing_ok=True)  # a copy that a kill interrupted
        with open(path, "rb") as events, open(copy_path, "xb") as copy:
            shutil.copyfileobj(events, copy)
            copy.flush()
            os.fsync(copy.fileno())
        sync_folder(folder)
        os.truncate(path, 0)


def _truncate(path: Path, size: int) -> None:
    from fulgurite_tensorboard.events import truncate_events

    _check_file(path)
    truncate_events(path, size)


def _check_file(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path} is missing, which the checkpoint knows: put it back")
