"""Who writes to a run: a lock of the kernel, and a heartbeat for those whom that lock does not
reach."""

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError

HEARTBEAT = 10.0
"""Seconds between two heartbeats."""
DEAD = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps
_SIZE = 1024  # of the file: always the same, so that one write replaces all of it


@dataclass(frozen=True)
class Owner:
    """Who began the newest attempt of a run, as its lock file says.

    Attributes:
        host, boot: the machine, and which start of it.
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
    def here(self) -> bool:
        """Whether it is or was on this machine, since its last start."""
        return (self.host, self.boot) == (platform.node(), _boot())

    @property
    def running(self) -> bool:
        """Whether its process may still be there, as far as this machine can tell."""
        if self.ended or not self.here:
            return not self.ended
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is there, and somebody else's
        return True

    def __str__(self) -> str:
        return f"attempt {self.attempt}, process {self.pid} on {self.host}"


def owner_of(path: Path) -> tuple[Owner, float] | None:
    """The owner in the lock file `path` and the time of the last heartbeat, in seconds since 1970;
    None if there is none. Locks nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        owner = _read(descriptor)
        return None if owner is None else (owner, os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)


class Lock:
    """Holds the lock file `path` for `attempt` from its making until `release`.

    On one machine the kernel's lock decides; it is free as soon as its owner is gone. An owner on
    another machine, where that lock may not be seen, counts as dead after 60 s without a heartbeat,
    by the clock of the file system: the new one waits for as long. A daemon thread renews the
        heartbeat.

    Raises `CheckpointError` if there is another owner, and from `check` once another one has taken
    over.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self.attempt = path, attempt
        self._checked = time.clock_gettime(_CLOCK)
        self._descriptor = self._acquired()
        self._owner = Owner(platform.node(), _boot(), os.getpid(), time.time(), attempt)
        try:
            self._write(self._owner)
        except OSError:
            os.close(self._descriptor)
            raise
        _HELD.add(self)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fulgurite-heartbeat", daemon=True)
        self._thread.start()

    def check(self, within: float = 0.0) -> None:
        """Raises `CheckpointError` if another attempt owns the run now; nothing is read if that was
        done less than `within` seconds ago. A file that is gone is nobody's."""
        now = time.clock_gettime(_CLOCK)
        if now - self._checked < within:
            return
        found = owner_of(self._path)
        if found is not None and found[0] != self._owner:
            why = f"this process had shown no sign of life for {DEAD:.0f} s. End it; the other one continues"
            raise CheckpointError(f"{self._path.parent} was taken over by {found[0]}: {why}")
        self._checked = now

    def release(self) -> None:
        """Ends the heartbeat and lets go of the lock."""
        self._released.set()
        self._thread.join()
        found = owner_of(self._path)
        try:
            if found is not None and found[0] == self._owner:
                self._write(replace(self._owner, ended=True))
        finally:
            _HELD.discard(self)
            os.close(self._descriptor)

    def _acquired(self) -> int:
        """The open and locked file, once nobody else holds it."""
        self._seen: float | None = None
        while True:
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
            )
            try:
                if self._is_taken(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(min(1.0, HEARTBEAT / 10))

    def _is_taken(self, descriptor: int) -> bool:
        """Whether the open file is ours now; if not, look again. An owner that lives is an
        error."""
        file = os.fstat(descriptor)
        if not stat.S_ISREG(file.st_mode):
            raise CheckpointError(f"{self._path} is no regular file: remove it")
        free, owner = _locked(descriptor), _read(descriptor)
        if not _is_at(file, self._path):
            return False  # another file was put in its place in the meantime
        if free and (owner is None or owner.ended or owner.here):
            return True
        if owner is None or owner.here or self._seen not in (None, file.st_mtime):
            user, fix = (
                owner or "another process",
                "wait for its end, or choose another run directory",
            )
            raise CheckpointError(f"{self._path.parent} is in use by {user}: {fix}")
        with tempfile.TemporaryFile(
            dir=self._path.parent
        ) as now:  # by the file system's clock, by ours if that jumped
            idle = (
                os.fstat(now.fileno()).st_mtime - file.st_mtime,
                time.clock_gettime(_CLOCK) - self._checked,
            )
        if (left := DEAD - max(idle)) <= 0:
            if (
                not free
            ):  # a file server still keeps the lock of a machine that is gone: leave it that file
                os.replace(self._path, self._path.with_name(f"{self._path.name}.{owner.attempt}"))
            return free
        if self._seen is None:
            user = (
                f"{self._path.parent} was last used by {owner}, which never recorded that it ended"
            )
            warnings.warn(f"{user}: waiting up to {left:.0f} s for a sign of life", stacklevel=2)
        self._seen = file.st_mtime
        return False

    def _beat(self) -> None:
        told = False
        while not self._released.wait(HEARTBEAT):
            found = owner_of(self._path)
            if found is not None and found[0] != self._owner:
                return  # `check` says so before the next write
            try:
                os.utime(self._descriptor)
            except OSError as error:
                if not told:
                    warnings.warn(
                        f"the heartbeat in {self._path} cannot be renewed: {error}", stacklevel=1
                    )
                told = True

    def _write(self, owner: Owner) -> None:
        os.pwrite(self._descriptor, json.dumps(asdict(owner)).encode().ljust(_SIZE), 0)
        os.fsync(self._descriptor)


# A forked process would keep the kernel's lock for as long as it lives, longer perhaps than the one
# that trains.
_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [os.close(lock._descriptor) for lock in _HELD])


def _locked(descriptor: int) -> bool:
    # Not `lockf`: its locks do not hold between two fits of one process, and go when anyone there
    # closes the file.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(descriptor: int) -> Owner | None:
    """The owner in an open file, None if it is empty or was not written by us."""
    try:
        kept: Any = json.loads(os.pread(descriptor, _SIZE, 0))
        owner = Owner(**kept)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = (str, str, int, (int, float), int, bool)
    return owner if all(map(isinstance, asdict(owner).values(), kinds)) and owner.pid > 0 else None


def _is_at(file: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(file, os.lstat(path))
    except FileNotFoundError:
        return False


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: machines are told apart by name alone
