"""What a run leaves behind: its directory, references to its checkpoints, and what a checkpoint
holds."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.lock import Lock, Owner, owner_of
from fulgurite.tree.paths import parse
from fulgurite.triggers import StepRange

if TYPE_CHECKING:
    from fulgurite.training.state import TrainState

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RECORDS = re.compile(r"(?!telemetry\.)[a-z][a-z0-9_-]{0,63}\.(jsonl|csv)")
_MANIFEST_SIZE = 16 * 2**20  # bytes, far beyond any
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,11})")


@dataclass(frozen=True)
class CheckpointRef:
    """A reference to a checkpoint, which the active checkpointer resolves.

    Attributes:
        path: of the run directory; None is the run itself, wherever its checkpointer keeps them.
        step: a step, the newest one, or the best by the checkpointer's metric.
        optional: whether it is fine that there is none.
        map: to read only a part: paths of the new state, each with the path in the checkpoint that
            fills it, such as `{"module.encoder": "module.backbone"}`. None is everything.
        strict: whether every array below the paths of `map` must have its counterpart, on both
            sides.
    """

    path: str | os.PathLike[str] | None
    step: int | Literal["latest", "best"] = "latest"
    optional: bool = False
    map: dict[str, str] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.step not in ("latest", "best") and type(self.step) is not int:
            raise ConfigurationError(
                f"Checkpoint: step is {self.step!r}; it must be a step, 'latest' or 'best'"
            )
        if not isinstance(self.path, str | os.PathLike | None) or not isinstance(
            self.map, dict | None
        ):
            raise ConfigurationError(
                f"{self!r}: path must be that of a run, and map a dictionary of paths to paths"
            )
        for path in (*(self.map or ()), *(self.map or {}).values()):
            parse(path)


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to continue from where it was.

    Attributes:
        state: the train state.
        span: of the fit that it belongs to.
        position: of the data, after the batch of the last update.
        pending: the actions that were due at this step and did not come to an end.
        host: what plugins keep on the host: `{"version": int, "state": JSON}` by plugin name.
        metrics: the newest metrics by source.
        asked: the steps and epochs, one of them None, that the fit was to take.
        newest: whether its run has no later one.
    """

    state: "TrainState"
    step_range: StepRange
    data_position: Any
    pending_actions: tuple[str, ...] = ()
    host_states: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    requested_length: tuple[int | None, int | None] | None = None
    is_latest: bool = True


class RunDirectory:
    """The layout of a run on disk. Everyone may read it; only the process that holds it writes.

    lock                who writes, and its heartbeat
    attempts/N          the manifest of each start of the run, as JSON
    checkpoints/step-N  a checkpoint, complete once it holds COMMIT
    superseded/N/ checkpoints and records that attempt N did not continue from
    COMPLETE            there once the run has reached its planned end

    Names that are not ours and links are passed over; a folder of ours that is a link is an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path) or "://" in os.fspath(path):
            raise ConfigurationError(
                f"run_dir={path} is no local folder, as a run needs; checkpoints may be elsewhere"
            )
        self.path = Path(path).absolute()  # the program may change its working directory
        self._lock: Lock | None = None

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` is this directory."""
        return os.path.realpath(path) == os.path.realpath(self.path)

    @property
    def complete(self) -> bool:
        """Whether the run has reached its planned end."""
        return _is_file(self.path / "COMPLETE")

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max(
            (
                int(file.name)
                for file in self._list_numbered("attempts")
                if _NUMBER.fullmatch(file.name)
            ),
            default=0,
        )

    def manifest(self) -> dict[str, Any]:
        """A description of the newest attempt, see `fulgurite.manifest`. Imports and calls nothing.
        A `CheckpointError` if there is no attempt, or its manifest is incomplete."""
        if not self.attempts:
            raise CheckpointError(f"there is no run in {self.path}: check the path")
        path = self.path / "attempts" / str(self.attempts)
        try:
            if not _is_file(path) or path.stat().st_size > _MANIFEST_SIZE:
                raise ValueError("there is no file of a manifest's size")
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
            return found
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read as the manifest of a run: {error}; check the path"
            ) from error

    @property
    def owner(self) -> tuple[Owner, float] | None:
        """Who began the newest attempt, and the time of its last heartbeat in seconds since 1970;
        None if nobody did."""
        return owner_of(self.path / "lock")

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Steps and directories of the complete checkpoints, oldest first."""
        named = [
            (_STEP.fullmatch(path.name), path)
            for path in self._list_numbered("checkpoints")
            if not path.is_symlink()
        ]
        return sorted(
            (int(match[1]), path) for match, path in named if match and _is_file(path / "COMMIT")
        )

    def step_directory(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.path / "checkpoints" / f"step-{step}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the directory and is its only writer inside the block. A `CheckpointError` if
        another fit is."""
        with self._wrap_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / "lock", self.attempts + 1)
        try:
            yield
        finally:
            lock, self._lock = self._lock, None
            lock.release()

    def assert_locked(self, within: float = 0.0) -> None:
        """Raises `CheckpointError` if another process has taken the run over; asked before
        everything that is written. An answer less than `within` seconds old will do."""
        if self._lock is not None:
            self._lock.check(within)

    def start_attempt(
        self, manifest: str = "", step: int | None = None, newest: bool = True
    ) -> int:
        """Notes a new attempt with its manifest, as JSON; gives its number, from 1.

        The attempt continues from `step` of this directory, or from nothing. What is in its way
        moves to
        `superseded/N`: later checkpoints, and the records (a copy, if they will be rewound). The
            completion mark goes.
        Later checkpoints may also be elsewhere: then `step` is not the `newest`.
        """
        with self._wrap_write_errors():
            self.assert_locked()
            number = self._lock.attempt if self._lock else self.attempts + 1
            self.folder("attempts").mkdir(parents=True, exist_ok=True)
            (self.path / "COMPLETE").unlink(missing_ok=True)
            _create(self.path / "attempts" / str(number), manifest)
            self._supersede(number, step, newest)
            return number

    def mark_complete(self) -> None:
        """Notes that the run has reached its planned end."""
        with self._wrap_write_errors():
            self.assert_locked()
            if not self.complete:
                _create(self.path / "COMPLETE", "")

    def _supersede(self, attempt: int, step: int | None, newest: bool) -> None:
        # At each moment of this, what is left can be gone on from: the newest checkpoint moves
        # first, and the records that belong to it stay until it has moved.
        later = [
            path for at, path in reversed(self.list_checkpoints()) if step is None or at > step
        ]
        records = [
            path for path in self.path.glob("*") if _RECORDS.fullmatch(path.name) and _is_file(path)
        ]
        if not later and (not records or (step is not None and newest)):
            return
        self.folder("superseded").mkdir(exist_ok=True)
        target = self.path / "superseded" / str(attempt)
        target.mkdir()
        if step is not None:
            for path in records:
                shutil.copyfile(path, target / path.name, follow_symlinks=False)
        for path in (*later, *records * (step is None)):
            path.rename(target / path.name)

    @contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error}. Choose another run directory"
            ) from error

    def folder(self, name: str) -> Path:
        """The folder `name` of the run, which may not be there; a link in its place is an error."""
        folder = self.path / name
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a link, of which a run directory has none: put the folder itself there"
            )
        return folder

    def _list_numbered(self, name: str) -> list[Path]:
        return list(folder.iterdir()) if (folder := self.folder(name)).is_dir() else []


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _create(path: Path, text: str) -> None:
    """A new file, durable; an error if there is one already."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
