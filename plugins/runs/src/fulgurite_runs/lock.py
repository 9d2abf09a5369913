"""Who writes to a run: a lock of the kernel, and a heartbeat for machines that do not see it."""

import errno
import fcntl
import json
import os
import platform
import stat
import tempfile
import threading
import time
import warnings
import weakref
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite.plugins import WaitAbandoned

from fulgurite_runs.waiting import call_abandonable

HEARTBEAT = 10.0
"""Seconds between two heartbeats."""
DEAD = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
# This clock does not stop while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_CLOCK_PRECISION = 2.0
"""In seconds: the kernel says in whole ones when it began."""
# The kernel's numbers of processes are 32 bits wide.
_LARGEST_NUMBER = 2**31 - 1
# The file always has the same size in bytes, so that one write replaces all of it.
_SIZE = 1024


class InUseError(CheckpointError):
    """Another process writes to a run directory.

    Example:
        from fulgurite_runs import InUseError, RunDirectory

        with RunDirectory("runs/used").lock():
            try:
                RunDirectory("runs/used").check_unused()
            except InUseError as error:
                print(error)
    """


@dataclass(frozen=True)
class Owner:
    """Who began the newest attempt of a run, as its lock file says.

    Example:
        from pathlib import Path

        from fulgurite_runs import Lock, read_owner

        with Lock(Path("lock"), attempt=1):
            owner, heartbeat = read_owner(Path("lock"))
        owner.attempt  # 1

    Attributes:
        host: the name of the machine.
        boot: which start of that machine.
        pid: the process.
        started: when the fit began, in seconds since 1970.
        attempt: its number.
        ended: whether the fit is over.
    """

    host: str
    boot: str
    pid: int
    started: float
    attempt: int
    ended: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is or was on this machine, since its last start."""
        return (self.host, self.boot) == (platform.node(), _read_boot_id())

    def is_running(self, last_heartbeat: float) -> bool:
        """Return whether its process may still be there, as far as this machine can tell.

        Args:
            last_heartbeat: when the last one was, in seconds since 1970.
        """
        if self.ended:
            return False
        is_silent = time.time() - last_heartbeat > DEAD
        if not self.is_local:
            return not is_silent
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is there, and somebody else's
        # The number of a process that is gone is given to another one. Not by the start alone: a
        # clock that was wrong when the fit began and is right now makes a process look younger.
        began = _read_start(self.pid)
        return not is_silent or began is None or began <= self.started + _CLOCK_PRECISION

    def __str__(self) -> str:
        return f"attempt {self.attempt}, process {self.pid} on {self.host}"


def read_owner(path: Path) -> tuple[Owner, float] | None:
    """Return the owner in the lock file `path` and the time of the last heartbeat, in seconds since
    1970; None if there is none. Locks nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        owner = _parse_owner(descriptor)
        return None if owner is None else (owner, os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)


class Lock(AbstractContextManager["Lock", None]):
    """Holds a lock file from its making until the end of the block, or until `release`.

    On one machine the kernel's lock decides; it is free as soon as its owner is gone. An owner on
    another machine, where that lock may not be seen, counts as dead after 60 s without a heartbeat,
    by the clock of the file system: the new one waits for as long. A daemon thread renews the
    heartbeat.

    Example:
        from pathlib import Path

        from fulgurite_runs import Lock

        with Lock(Path("lock"), attempt=1) as lock:
            lock.check()

    Args:
        path: the lock file; it is made where it is missing.
        attempt: the number of the attempt that takes the lock.

    Raises:
        CheckpointError: there is another owner.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.attempt = attempt
        self._path = path
        self._checked = time.clock_gettime(_CLOCK)
        self._last_heartbeat: float | None = None
        self._descriptor = call_abandonable(f"the lock {path}", self._acquire)
        self._previous = call_abandonable(f"the lock {path}", self._read_previous)
        self._owner = Owner(platform.node(), _read_boot_id(), os.getpid(), time.time(), attempt)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fulgurite-heartbeat", daemon=True)
        try:
            call_abandonable(f"the lock {path}", partial(self._write, self._owner))
            self._start_heartbeat()
        except WaitAbandoned:
            raise  # to close the file would hang as well, and the process ends
        except BaseException:
            os.close(self._descriptor)
            raise
        _HELD.add(self)

    def check(self, within: float = 0.0) -> None:
        """Raise `CheckpointError` if another attempt owns the run now, or nobody keeps others out.

        A lock file that was deleted or replaced is lost: another process can lock the new one.
        Nothing is read if that was done less than `within` seconds ago.
        """
        if self._descriptor == _NOT_INHERITED:
            raise CheckpointError(
                f"{self._path.parent} is in use by {self._owner}, from which this process was "
                "forked: only that one may write there"
            )
        now = time.clock_gettime(_CLOCK)
        if now - self._checked < within:
            return
        call_abandonable(f"the lock {self._path}", self._check)
        self._checked = now

    def _check(self) -> None:
        successor = self._read_successor()
        is_lost = self._is_lost()
        if successor is not None and (not is_lost or self._is_set_aside()):
            raise CheckpointError(
                f"{self._path.parent} was taken over by {successor}: this process had shown no "
                f"sign of life for {DEAD:.0f} s. End it; the other one continues"
            )
        if is_lost:
            consequence = "so that another process may write"
            if successor is not None:
                consequence = f"and {successor} has begun a run that writes"
            raise CheckpointError(
                f"{self._path} was deleted or replaced while this process held it, {consequence} "
                f"to {self._path.parent}: nothing more is written there. Start the program again, "
                f"with another run directory if that one is in use"
            ) from FileNotFoundError(errno.ENOENT, "the locked file is gone", str(self._path))

    def release(self) -> None:
        """End the heartbeat and release the lock; warn if the file could not say so."""
        failure = self._end()
        if failure is not None:
            warnings.warn(failure, stacklevel=2)

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        failure = self._end()
        if failure is None:
            return
        if error is None:
            warnings.warn(failure, stacklevel=2)
        else:
            error.add_note(failure)

    def _end(self) -> str | None:
        """Release the lock, unless another process has it; return what could not be written."""
        if self._descriptor == _NOT_INHERITED:
            return None
        # The heartbeat may hang, too.
        return call_abandonable(f"the lock {self._path}", self._release)

    def _release(self) -> str | None:
        """Release the lock, and return what could not be written.

        That is not an error: all that was to be done under the lock is done, and its end alone is
        not noted. An error would hide the one that ends the block, often of the same disk.
        """
        self._released.set()
        self._thread.join()
        entry = read_owner(self._path)
        failure = None
        try:
            if entry is not None and entry[0] == self._owner:
                self._write(replace(self._owner, ended=True))
        except OSError as error:
            failure = error
        _HELD.discard(self)
        try:
            os.close(self._descriptor)
        except OSError as error:
            failure = failure or error
        if failure is None:
            return None
        return (
            f"{self._path} could not be updated at the end of {self._owner}: {failure}. The lock "
            f"is free; another machine waits for up to {DEAD:.0f} s before it takes it"
        )

    def give_back(self) -> None:
        """Release the lock, and leave the file as it was before: the run belongs to whoever trained
        it last."""
        if self._descriptor != _NOT_INHERITED:
            call_abandonable(f"the lock {self._path}", self._give_back)

    def _read_previous(self) -> tuple[bytes, os.stat_result]:
        """Return the content of the file before this lock, and its times."""
        return os.pread(self._descriptor, _SIZE, 0), os.fstat(self._descriptor)

    def _give_back(self) -> None:
        self._released.set()
        self._thread.join()
        content, file = self._previous
        try:
            if self._read_successor() is None and not self._is_lost():
                os.pwrite(self._descriptor, content, 0)
                os.ftruncate(self._descriptor, len(content))
                os.utime(self._descriptor, ns=(file.st_atime_ns, file.st_mtime_ns))
                os.fsync(self._descriptor)
        finally:
            _HELD.discard(self)
            os.close(self._descriptor)

    def _read_successor(self) -> Owner | None:
        """Return who owns the run instead of this lock."""
        entry = read_owner(self._path)
        if entry is None or entry[0] == self._owner:
            return None
        return entry[0]

    def _is_lost(self) -> bool:
        """Return whether the file that this process locked is no longer the one at the path."""
        try:
            return not _is_same_file(os.fstat(self._descriptor), self._path)
        except OSError:
            return False  # the path cannot be looked at now: the write that follows says why

    def _is_set_aside(self) -> bool:
        """Return whether another process has taken this one for dead and left it its file."""
        try:
            file = os.fstat(self._descriptor)
            return _is_same_file(file, self._get_set_aside_path(self.attempt))
        except OSError:
            return False

    def _get_set_aside_path(self, attempt: int) -> Path:
        """Return where the file of a dead owner goes if its lock cannot be taken."""
        return self._path.with_name(f"{self._path.name}.{attempt}")

    def _acquire(self) -> int:
        """Return the open and locked file, once nobody else holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            descriptor = os.open(self._path, flags, 0o644)
            try:
                if self._try_take(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(min(1.0, HEARTBEAT / 10))

    def _try_take(self, descriptor: int) -> bool:
        """Return whether the open file is ours now; if not, the caller opens it again.

        Raises:
            CheckpointError: the owner lives.
        """
        file = os.fstat(descriptor)
        if not stat.S_ISREG(file.st_mode):
            raise CheckpointError(f"{self._path} is not a regular file: remove it")
        is_free = _try_flock(descriptor)
        owner = _parse_owner(descriptor)
        if not _is_same_file(file, self._path):
            return False  # another file was put in its place in the meantime
        if is_free and (owner is None or owner.ended or owner.is_local):
            return True
        if owner is None or owner.is_local or self._has_beaten_since(file):
            raise _make_in_use_error(self._path, owner)
        return self._wait_for_death(file, owner, is_free)

    def _has_beaten_since(self, file: os.stat_result) -> bool:
        return self._last_heartbeat not in (None, file.st_mtime)

    def _wait_for_death(self, file: os.stat_result, owner: Owner, is_free: bool) -> bool:
        """Return whether the file of an owner on another machine is ours, because it is dead."""
        # By the file system's clock, and by ours if that one jumped.
        with tempfile.TemporaryFile(dir=self._path.parent) as probe:
            by_file_system = os.fstat(probe.fileno()).st_mtime - file.st_mtime
        by_this_machine = time.clock_gettime(_CLOCK) - self._checked
        remaining = DEAD - max(by_file_system, by_this_machine)
        if remaining <= 0:
            if not is_free:
                # A file server still keeps the lock of a machine that is gone: leave it that file.
                os.replace(self._path, self._get_set_aside_path(owner.attempt))
            return is_free
        if self._last_heartbeat is None:
            warnings.warn(
                f"{self._path.parent} was last used by {owner}, which never recorded that it "
                f"ended: waiting up to {remaining:.0f} s for a sign of life",
                stacklevel=2,
            )
        self._last_heartbeat = file.st_mtime
        return False

    def _start_heartbeat(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._path.parent} cannot be locked: the system starts no thread for the "
                f"heartbeat ({error}). End other processes, or raise the limit of `ulimit -u`"
            ) from error

    def _beat(self) -> None:
        has_warned = False
        while not self._released.wait(HEARTBEAT):
            if self._read_successor() is not None:
                return  # `check` says so before the next write
            try:
                os.utime(self._descriptor)
            except OSError as error:
                if not has_warned:
                    warnings.warn(
                        f"the heartbeat in {self._path} cannot be renewed: {error}", stacklevel=1
                    )
                has_warned = True

    def _write(self, owner: Owner) -> None:
        content = json.dumps(asdict(owner)).encode().ljust(_SIZE)
        num_written = os.pwrite(self._descriptor, content, 0)
        if num_written != len(content):
            raise OSError(
                errno.ENOSPC, f"only {num_written} of {_SIZE} bytes were written", str(self._path)
            )
        os.fsync(self._descriptor)


# A forked process would keep the kernel's lock for as long as it lives, longer perhaps than the one
# that trains.
_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
_NOT_INHERITED = -1


def _close_inherited_locks() -> None:
    for lock in _HELD:
        os.close(lock._descriptor)
        # A file that the forked process opens later gets the same number.
        lock._descriptor = _NOT_INHERITED
    _HELD.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


def check_unused(path: Path) -> None:
    """Raise `CheckpointError` if a process holds the lock file `path`, as far as the kernel knows.

    It changes nothing, and what follows may still find that the run is in use.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # there is none, or taking it will say what is wrong with it
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and not _try_flock(descriptor):
            raise _make_in_use_error(path, _parse_owner(descriptor))
    finally:
        os.close(descriptor)


def _make_in_use_error(path: Path, owner: Owner | None) -> InUseError:
    return InUseError(
        f"{path.parent} is in use by {owner or 'another process'}: wait for its end, or choose "
        f"another run directory"
    )


def _try_flock(descriptor: int) -> bool:
    # Not `lockf`: its locks do not hold between two fits of one process, and go when anyone there
    # closes the file.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse_owner(descriptor: int) -> Owner | None:
    """Return the owner in an open file; None if it is empty or was not written by us."""
    try:
        fields: Any = json.loads(os.pread(descriptor, _SIZE, 0))
        owner = Owner(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return owner if _is_valid(owner) else None


def _is_valid(owner: Owner) -> bool:
    """Return whether the values of an owner, which may be of any type, are what is written here."""
    return (
        all(isinstance(text, str) and text.isprintable() for text in (owner.host, owner.boot))
        and all(_is_number(number) for number in (owner.pid, owner.attempt))
        and type(owner.started) in (int, float)
        and type(owner.ended) is bool
    )


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_NUMBER


def _is_same_file(file: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(file, os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read_start(pid: int) -> float | None:
    """Return when a process of this machine began, in seconds since 1970; None if that is not
    known here."""
    try:
        # Its name, in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(fields[19])
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: machines differ by name only
