"""The run directory: what a run leaves behind on disk, and who may write there."""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError

from fulgurite_runs.json_codec import check_readable, check_size, loads
from fulgurite_runs.lock import Lock, Owner, check_unused, read_owner
from fulgurite_runs.waiting import call_abandonable

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RECORDS = re.compile(r"(?!telemetry\.)[a-z][a-z0-9_-]{0,63}\.(jsonl|csv)")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,11})")


class RunDirectory:
    """The layout of a run on disk. Everyone may read it; only the process that holds it writes.

        lock                who writes, and its heartbeat
        attempts/N          the manifest of each start, with when it and its fit began, as JSON
        checkpoints/step-N  a checkpoint, complete once it holds COMMIT
        superseded/N/       checkpoints and records that attempt N did not continue from
        COMPLETE            there once the run has reached its planned end

    Other names and links are passed over; a link in place of one of these folders is an error.

    Example:
        from fulgurite_runs import RunDirectory

        directory = RunDirectory("runs/digits")
        steps = [step for step, path in directory.list_checkpoints()]

    Args:
        path: a local folder, which need not exist. `~` and variables such as `$HOME` are expanded,
            but not in an absolute `pathlib.Path`. A relative path is resolved at once, because the
            program may change its working directory.

    Raises:
        ConfigurationError: the path is empty or not local.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path) or "://" in os.fspath(path):
            raise ConfigurationError(
                f"run_dir={path} is not a local folder: give one; checkpoints may be elsewhere, "
                f"see Checkpointer(directory=...)"
            )
        self.path = Path(expand_path(path)).absolute()
        self._lock: Lock | None = None

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether `path` is this directory."""
        return os.path.realpath(expand_path(path)) == os.path.realpath(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its planned end."""
        with self._wrap_read_errors():
            return _is_file(self.path / "COMPLETE")

    @property
    def num_attempts(self) -> int:
        """How often the run was started."""
        return max(self._list_attempts(), default=0)

    def _list_attempts(self) -> list[int]:
        with self._wrap_read_errors():
            names = [file.name for file in self._list_folder("attempts")]
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def read_manifest(self) -> dict[str, Any]:
        """Return the description of the newest attempt, see `fulgurite_runs.manifest`. Imports and
        calls nothing.

        Raises:
            CheckpointError: there is no attempt, or its manifest is incomplete.
        """
        return self._read_manifest(self._find_manifest())

    def read_manifests(self) -> dict[int, dict[str, Any]]:
        """Return the descriptions of all attempts by their numbers, in order; without empty ones.

        Raises:
            CheckpointError: one is incomplete.
        """
        with self._wrap_read_errors():
            paths = {
                number: self.path / "attempts" / str(number) for number in self._list_attempts()
            }
            written = {number: path for number, path in paths.items() if not _is_empty(path)}
        return {number: self._read_manifest(path) for number, path in written.items()}

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        with self._wrap_read_errors():
            try:
                if not _is_file(path):
                    raise ValueError("it is not a file")
                check_size(path.stat().st_size)
                manifest = loads(path.read_bytes())
                if not isinstance(manifest, dict):
                    raise ValueError("it is not a JSON object")
                return manifest
            except (ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as the manifest of a run: {error}; check the path"
                ) from error

    def _find_manifest(self) -> Path:
        """Return the newest manifest that is not empty. A machine that lost its power may leave an
        empty one, of an attempt that had done nothing yet."""
        with self._wrap_read_errors():
            numbers = self._list_attempts()
            if not numbers:
                raise CheckpointError(f"there is no run in {self.path}: check the path")
            folder = self.path / "attempts"
            paths = [folder / str(number) for number in reversed(numbers)]
            return next((path for path in paths if not _is_empty(path)), paths[0])

    def read_owner(self) -> tuple[Owner, float] | None:
        """Return who began the newest attempt, and the time of its last heartbeat in seconds since
        1970; None if nobody did."""
        return read_owner(self.path / "lock")

    def check_unused(self) -> None:
        """Raise `CheckpointError` if another process of this machine writes to the run."""
        check_unused(self.path / "lock")

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Return steps and directories of the complete checkpoints, oldest first."""
        checkpoints = []
        with self._wrap_read_errors():
            for path in self._list_folder("checkpoints"):
                match = _STEP.fullmatch(path.name)
                if match and not path.is_symlink() and _is_file(path / "COMMIT"):
                    checkpoints.append((int(match[1]), path))
        return sorted(checkpoints)

    def find_newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, damaged ones included; None without one."""
        steps = []
        with self._wrap_read_errors():
            for path in self._list_folder("checkpoints"):
                match = _STEP.fullmatch(path.name)
                if match and not path.is_symlink() and path.is_dir():
                    steps.append(int(match[1]))
        return max(steps, default=None)

    def get_step_directory(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or would be."""
        return self.path / "checkpoints" / f"step-{step}"

    def get_folder(self, name: str) -> Path:
        """Return the folder `name` of the run, which may not be there.

        Raises:
            CheckpointError: there is a link in its place.
        """
        return get_folder(self.path, name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the directory, and be its only writer inside the block.

        Raises:
            CheckpointError: another fit writes there, or the directory cannot be written.
        """
        lock = self._lock = self._take_lock()
        try:
            with lock:
                yield
        finally:
            self._lock = None

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Be the only writer of a run inside the block without being an attempt: `lock` says
        afterwards what it said before.

        Raises:
            CheckpointError: a fit writes there, or the directory cannot be written.
        """
        lock = self._lock = self._take_lock()
        try:
            yield
        finally:
            self._lock = None
            lock.give_back()

    def _take_lock(self) -> Lock:
        with self._wrap_write_errors():
            if self.path.is_symlink() and not self.path.exists():
                raise CheckpointError(
                    f"{self.path} is a link to {os.readlink(self.path)}, which is not there: make "
                    "that folder, or remove the link"
                )
            attempt = call_abandonable(f"the directory {self.path}", self._make)
            lock = Lock(self.path / "lock", attempt)
        if self.num_attempts + 1 != attempt:
            lock.give_back()
            raise CheckpointError(
                f"another fit began in {self.path} while this one waited for it: start again, to "
                f"resume from what it has left"
            )
        return lock

    def assert_locked(self, within: float = 0.0) -> None:
        """Raise `CheckpointError` if another process has taken the run over; called before
        everything that is written. An answer less than `within` seconds old will do."""
        if self._lock is not None:
            self._lock.check(within)

    def start_attempt(
        self, manifest: str = "", step: int | None = None, is_latest: bool = True
    ) -> int:
        """Note a new attempt and return its number, from 1.

        What the attempt does not continue from moves to `superseded/N`: later checkpoints, and the
        records (a copy of them, if they will be rewound). The completion mark goes.

        Args:
            manifest: of the attempt, as JSON.
            step: of this directory from which the attempt continues; None if from nothing there.
            is_latest: whether no checkpoint is later than `step`; later ones may be elsewhere.

        Raises:
            ConfigurationError: the manifest is too large to be read again.
        """
        check_readable(manifest, "the description of the run")
        with self._wrap_write_errors():
            self.assert_locked()
            return call_abandonable(
                f"the directory {self.path}",
                partial(self._start_attempt, manifest, step, is_latest),
            )

    def mark_complete(self) -> None:
        """Note that the run has reached its planned end."""
        with self._wrap_write_errors():
            self.assert_locked()
            call_abandonable(f"the directory {self.path}", self._create_mark)

    def _make(self) -> int:
        """Make the directory, and return the number of its next attempt."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.num_attempts + 1

    def _start_attempt(self, manifest: str, step: int | None, is_latest: bool) -> int:
        number = self._lock.attempt if self._lock else self.num_attempts + 1
        self.get_folder("attempts").mkdir(parents=True, exist_ok=True)
        (self.path / "COMPLETE").unlink(missing_ok=True)
        _create(self.path / "attempts" / str(number), manifest)
        self._supersede(number, step, is_latest)
        return number

    def _create_mark(self) -> None:
        if not self.is_complete:
            _create(self.path / "COMPLETE", "")

    def _supersede(self, attempt: int, step: int | None, is_latest: bool) -> None:
        # A run can be resumed from what is left at each moment of this: the newest checkpoint moves
        # first, and the records that belong to it stay until it has moved.
        later = [
            path
            for other, path in reversed(self.list_checkpoints())
            if step is None or other > step
        ]
        records = [
            path for path in self.path.glob("*") if _RECORDS.fullmatch(path.name) and _is_file(path)
        ]
        must_keep_records = step is None or not is_latest
        if not later and not (records and must_keep_records):
            return
        if step is None:
            supersede(self.path, [*later, *records], attempt=attempt)
        else:
            supersede(self.path, later, copied=records, attempt=attempt)

    @contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error}. Choose another run directory"
            ) from error

    @contextmanager
    def _wrap_read_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the run in {self.path} cannot be read: {error}. Check that it is there, and that "
                "you may read it"
            ) from error

    def _list_folder(self, name: str) -> list[Path]:
        folder = self.get_folder(name)
        return list(folder.iterdir()) if folder.is_dir() else []


@dataclass(frozen=True)
class EvaluationDirectory:
    """Where loggers write the results of the standalone evaluators of one group of a run.

    Example:
        from pathlib import Path

        from fulgurite_runs import EvaluationDirectory, RunDirectory
        from fulgurite_runs.lock import Lock

        Path("runs/a/evaluations").mkdir(parents=True)
        lock = Lock(Path("runs/a/evaluations/side.lock"), attempt=1)
        directory = EvaluationDirectory(RunDirectory("runs/a"), "side", lock)
        directory.path  # runs/a/evaluations/side

    Attributes:
        run: the directory of the run.
        group: of evaluators.
        lock: which this process holds; only its holder writes.
    """

    run: RunDirectory
    group: str
    lock: Lock

    @property
    def path(self) -> Path:
        """The folder."""
        return self.run.path / "evaluations" / self.group

    def assert_locked(self, within: float = 0.0) -> None:
        """Raise `CheckpointError` if another process has taken the group over; an answer less than
        `within` seconds old will do."""
        self.lock.check(within)


def supersede(
    root: Path, moved: Iterable[Path], copied: Iterable[Path] = (), attempt: int | None = None
) -> Path:
    """Set aside what a run does not continue from, and return the folder `superseded/N` in which it
    is now, or in `checkpoints/superseded/N` if `checkpoints/` is a mount of its own.

    Args:
        root: of the run, or of its checkpoints; a local or remote path.
        moved: files and folders to move there, in this order.
        copied: local files to copy there before that.
        attempt: the number of the folder; None for the next free one.
    """
    folder = get_folder(root, "superseded")
    if attempt is None:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        attempt = max((int(name) for name in names if name.isdecimal()), default=0) + 1
    target = folder / str(attempt)
    target.mkdir(parents=True)
    if not isinstance(target, Path):
        # A remote folder exists with its first file, and nothing can be moved into one that does
        # not.
        (target / "LEFT").write_text("by a run that does not continue from these checkpoints\n")
    for path in copied:
        shutil.copyfile(path, target / path.name, follow_symlinks=False)
    for path in moved:
        _move_into(path, target)
    return target


def list_superseded(run: Path) -> list[Path]:
    """Return the checkpoints that attempts of a run have set aside."""
    folders = [get_folder(run, "superseded"), get_folder(run, "checkpoints") / "superseded"]
    return [path for folder in folders for path in folder.glob("*/step-*")]


def _move_into(path: Path, folder: Path) -> None:
    """Move a file or folder of a run; to `superseded/` beside it where `checkpoints/` is a mount of
    its own, which has the room and where a move is one rename, whole or not at all."""
    try:
        path.rename(folder / path.name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = get_folder(path.parent, "superseded") / folder.name
        beside.mkdir(parents=True, exist_ok=True)
        path.rename(beside / path.name)


def hash_commit(checkpoint: Path) -> str | None:
    """Return the SHA-256 of a local checkpoint's `COMMIT`, in hexadecimal, which names the
    checkpoint; None if it is gone, or not a file. It may have any size."""
    try:
        # A pipe would block forever.
        descriptor = os.open(checkpoint / "COMMIT", os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return hashlib.file_digest(file, "sha256").hexdigest()


def expand_path(path: str | os.PathLike[str]) -> str:
    """Return a path with `~` and the variables of the environment expanded, as a shell would.

    An absolute `pathlib.Path` was computed by a program, often by this function: a `$` in it is
    part of the name of a folder.

    Raises:
        ConfigurationError: there is no such user or variable, and so there would be a folder of
            that name.
    """
    if isinstance(path, Path) and path.is_absolute():
        return str(path)
    text = os.path.expandvars(os.path.expanduser(path))
    if text.startswith("~"):
        raise ConfigurationError(f"{os.fspath(path)}: there is no such user; give ./~ for a folder")
    variable = _VARIABLE.search(text)
    if variable is not None:
        raise ConfigurationError(
            f"{os.fspath(path)}: the environment has no variable {variable[0]}; set it, or give "
            "the path itself"
        )
    return text


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic link; remote ones are none."""
    return isinstance(path, Path) and path.is_symlink()


def get_folder(root: Path, name: str) -> Path:
    """Return the folder `name` of a run, which may not be there.

    Args:
        root: of the run, or of its checkpoints; a local or remote path.
        name: of the folder.

    Raises:
        CheckpointError: there is a link in its place.
    """
    folder = root / name
    if is_link(folder):
        elsewhere = ""
        if name == "checkpoints":
            elsewhere = (
                ", or keep checkpoints elsewhere by Checkpointer(directory=...), under which they "
                "are in checkpoints/"
            )
        raise CheckpointError(
            f"{folder} is a link, and a run directory contains no links: put the folder itself "
            f"there{elsewhere}"
        )
    return folder


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _create(path: Path, text: str) -> None:
    """Write a new file durably, whole or not at all; an error if there is one already. Only the
    holder of the lock calls it."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary_path = path.with_name(f".{path.name}.new")
    with open(temporary_path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary_path.rename(path)
    sync_folder(path.parent)


def _is_empty(path: Path) -> bool:
    return _is_file(path) and path.stat().st_size == 0


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_in_place(descriptor: int, path: Path) -> None:
    """Raise `FileNotFoundError` if an open file is no longer the one at its path.

    Args:
        descriptor: of the file.
        path: at which it was opened.
    """
    try:
        is_in_place = os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        is_in_place = False
    if not is_in_place:
        raise FileNotFoundError(
            errno.ENOENT, "it was deleted or replaced while it was written to", str(path)
        )
