"""The compilation cache of a program that the command line starts: JAX's own, in the user's cache
directory.

JAX trusts what is in the directory, which is machine code. So it belongs to this user, nobody else
may write into it, and the files of others in it are removed before JAX sees them.

The size is bounded here and not by `jax_compilation_cache_max_size`. That looks at every entry
each time that it writes one: a first start, which writes about 25, took 0.7 s more of CPU time with
1,000 entries, and 3.9 s with 5,000. Here the directory is looked at once, in 0.004 s and 0.02 s.
"""

import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
from fulgurite.plugins import as_printable
from jax.experimental.compilation_cache import compilation_cache

from fulgurite_cli.processes import VARIABLE as PROCESSES_VARIABLE

VARIABLE = "FULGURITE_COMPILATION_CACHE"
MAX_BYTES = 2**30
MAX_FILES = 5_000

_SETTINGS: dict[str, Any] = {
    # JAX leaves out what compiles within a second, which most programs of a small model do.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_FAILURE = re.compile(
    "Error (reading|writing) persistent compilation cache entry for '(.+?)': (.*)", re.DOTALL
)


@dataclass(frozen=True)
class CompilationCache:
    """Where JAX keeps what it compiles for a program that the command line starts.

    Attributes:
        directory: that of JAX's settings, or the one of the command line; None for no cache.
        description: what to say of it in `fulgurite explain` and `fulgurite doctor`.
        is_default: whether the directory is that of the command line.
        problem: why that directory is not used, where something is wrong with it.
    """

    directory: Path | None
    description: str
    is_default: bool = False
    problem: str | None = None


def choose_compilation_cache(is_wanted: bool = True) -> CompilationCache:
    """Return the cache of a program that the command line starts. Nothing is written.

    Args:
        is_wanted: False if the command line says that there is none.
    """
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if configured is not None:
        return CompilationCache(Path(configured) if configured else None, configured or "none")
    value = os.environ.get(VARIABLE, "on")
    if not is_wanted or value == "off":
        switch = f"{VARIABLE}=off" if is_wanted else "--no-compilation-cache"
        return CompilationCache(None, f"none ({switch})")
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return CompilationCache(None, "none (jax_enable_compilation_cache is False)")
    if os.environ.get(PROCESSES_VARIABLE):
        return CompilationCache(None, "none, because the program runs in several processes")
    user_cache = _find_user_cache()
    if user_cache is None:
        return CompilationCache(None, "none, because there is no home directory")
    directory = user_cache / "fulgurite" / "compiled"
    problem = _find_problem(directory)
    if value != "on":
        problem = f"{VARIABLE} is {value!r}, and it is on or off"
    if problem is not None:
        return CompilationCache(None, f"none: {problem}", problem=problem)
    description = f"{directory} for programs that the command line starts; {VARIABLE}=off: none"
    return CompilationCache(directory, description, is_default=True)


@contextmanager
def use_compilation_cache(is_wanted: bool = True) -> Iterator[None]:
    """Have JAX keep what is compiled within the block, unless a user has chosen another cache, or
    none.

    Args:
        is_wanted: False if the command line says that there is none.
    """
    cache = choose_compilation_cache(is_wanted)
    if cache.problem is not None:
        _tell(f"programs are compiled without a cache: {cache.problem}")
    if not cache.is_default or cache.directory is None or not _tidy_up(cache.directory):
        yield
        return
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    directory = str(cache.directory)
    _set_jax({**_SETTINGS, "jax_compilation_cache_dir": directory})
    try:
        with _handle_failures(cache.directory):
            yield
    finally:
        # `Engine(compilation_cache_dir=)` may have set another one, which stays.
        if jax.config.jax_compilation_cache_dir == directory:  # type: ignore[attr-defined]
            _set_jax({**before, "jax_compilation_cache_dir": None})


def _set_jax(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # If something was compiled before, JAX remembers whether there is a directory.
    compilation_cache.reset_cache()


def _find_user_cache() -> Path | None:
    """Return the directory for what may be deleted; the standard of XDG ignores relative paths.
    None for a user without a home, as a container may have, where `~` would be a folder here."""
    path = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not path.is_absolute():
        path = Path(os.path.expanduser("~")) / ".cache"
    return path if path.is_absolute() else None


def _find_problem(directory: Path) -> str | None:
    """Return why a directory must not hold what is executed; None if it may, or does not exist."""
    try:
        status = directory.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{directory} cannot be read ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if not _is_ours(status):
        return f"{directory} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.name == "posix":
        return f"other users may write into {directory}: remove it"
    return None


def _is_ours(status: os.stat_result) -> bool:
    return os.name != "posix" or status.st_uid == os.getuid()


def _tidy_up(directory: Path) -> bool:
    """Make the directory of the cache, or remove from it what is not ours and what was not used for
    longest. Return whether it can be used: the home of a user may be read-only, or full."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        statuses = _read_statuses(directory)
    except OSError:
        return False
    # Links too: what they lead to may be anyone's.
    foreign = [
        path
        for path, status in statuses.items()
        if not (_is_ours(status) and stat.S_ISREG(status.st_mode))
    ]
    if foreign:
        _tell(f"files in {directory} that you did not write are removed: {len(foreign)}")
    for path in foreign:
        del statuses[path]
    for path in (*foreign, *_find_old(statuses)):
        with suppress(OSError):  # another process has done it
            path.unlink()
    return True


def _read_statuses(directory: Path) -> dict[Path, os.stat_result]:
    """Return the status of each file below a directory; JAX has folders in it for some GPUs."""
    statuses = {}
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            with suppress(FileNotFoundError):
                path = Path(folder, name)
                statuses[path] = path.lstat()
    return statuses


def _find_old(statuses: dict[Path, os.stat_result]) -> list[Path]:
    """Return the files that were not used for longest, as many as are too many or too large."""

    def get_last_use(path: Path) -> float:
        # Not every file system notes when a file was read.
        return max(statuses[path].st_atime, statuses[path].st_mtime)

    newest_first = sorted(statuses, key=get_last_use, reverse=True)
    sizes = accumulate(statuses[path].st_size for path in newest_first)
    return [
        path
        for number, (path, size) in enumerate(zip(newest_first, sizes, strict=True))
        if number >= MAX_FILES or size > MAX_BYTES
    ]


@contextmanager
def _handle_failures(directory: Path) -> Iterator[None]:
    """Say once in one line that entries cannot be read or written, for which JAX warns each time.

    JAX compiles what it cannot read, but never replaces the entry: a process that is killed while
    it writes would leave a warning for each later one. So the entry is removed.
    """
    show_warning = warnings.showwarning
    handled: set[str] = set()

    def handle(message: Warning | str, *details: Any, **named_details: Any) -> None:
        failure = _FAILURE.match(str(message))
        if failure is None:
            show_warning(message, *details, **named_details)
            return
        action, name, reason = failure.groups()
        if action == "reading":
            _remove_entries(directory, name)
        if action not in handled:
            handled.add(action)
            consequence = "it is compiled again" if action == "reading" else "it is not kept"
            _tell(f"{action} {name} in {directory} failed ({reason}): {consequence}")

    warnings.filterwarnings("always", message="Error (read|writ)ing persistent compilation cache")
    warnings.showwarning = handle
    try:
        yield
    finally:
        # A program that has set a function of its own meanwhile keeps it.
        if warnings.showwarning is handle:
            warnings.showwarning = show_warning


def _remove_entries(directory: Path, name: str) -> None:
    """Remove the entries of all programs of one name: JAX does not say which of them it read."""
    for path in directory.iterdir():
        if path.name.startswith(f"{name}-"):
            with suppress(OSError):
                path.unlink()


def _tell(text: str) -> None:
    with suppress(OSError):  # what reads it may be gone
        print(as_printable(f"warning: {text}"), file=sys.stderr, flush=True)
