"""A checkpoint on disk, and what is read of it without Orbax.

RUN/checkpoints/
    step-N/                 a complete checkpoint; it gets this name, by a rename, when it is
    complete
        COMMIT              JSON: format, step, attempt, the sinks' positions by process, metrics,
                            the metric of the best, timers, and SHA-256 of the `hashes-P.json` and
                            of itself
        hashes-P.json       size and CRC-32 of every file that process P wrote, by name
        manifest.json       what the run is made of (`fulgurite_runs.manifest`)
        index.json          shape and dtype of the arrays by path; span, pending actions and newest
        metrics of the run host-P.json         of process P: the place in its data, the host states
        of its plugins arrays/             an Orbax checkpoint of a flat dictionary: path -> array
    saving-step-N/          one that is being written, or was when its process ended
    trash-step-N/           one that is being removed, or was when its process ended
    damaged-step-N-A/       one that attempt A found incomplete where it had to write

`COMMIT` is written last, after everything else is on the disk. Nothing that is read is executed,
and no name that is
read from a file is joined to a path: the files there are listed, and looked up by their names.
"""

import hashlib
import importlib.util
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs.json_codec import dumps, loads

FORMAT = 1
LIMIT = 64 * 2**20
"""The most bytes that are read of a JSON file."""
STEP = re.compile(r"step-(0|[1-9][0-9]{0,11})")
SMALL = re.compile(r"(?:manifest|index|host-[0-9]+)\.json")
LEFT = re.compile(r"(?:saving|trash)-step-(?:0|[1-9][0-9]{0,11})")
CHUNK = 4 * 2**20

Verify = Literal["full", "size", "none"]


class Damaged(CheckpointError):
    """A checkpoint that is incomplete, or not as it was written."""


@dataclass(frozen=True)
class Commit:
    """What `COMMIT` holds.

    Attributes:
        step, attempt: the number of completed updates, and which start of the run saved them.
        hashes: SHA-256 of the files `hashes-P.json`, in the order of the processes.
        positions: of the sinks by plugin name, in the order of the processes.
        metrics: those measured at this very step, by source.
        best: the metric by which its run chooses the best, as `SOURCE/NAME`, and `min` or `max`; or
            None.
        timers: seconds by name, over all attempts.
        wall: when it was saved, in seconds since 1970.
    """

    step: int
    attempt: int
    hashes: list[str]
    positions: list[dict[str, Any]]
    metrics: dict[str, dict[str, Any]]
    best: tuple[str, str] | None
    timers: dict[str, float]
    wall: float


@dataclass(frozen=True)
class Entry:
    """A directory called like a checkpoint: its `commit`, or what is wrong with it."""

    step: int
    path: Path
    commit: Commit | None
    damage: str | None = None

    def value(self, metric: str) -> float | None:
        """The metric `SOURCE/NAME` measured at its step, if there is one and it is a number."""
        source, _, name = metric.partition("/")
        value = self.commit.metrics.get(source, {}).get(name) if self.commit else None
        usable = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        return float(value) if usable else None  # type: ignore[arg-type]


def resolve_root(path: str | os.PathLike[str]) -> Path:
    """A local path as a `pathlib.Path`, one that begins with `gs://` as an `etils.epath.Path`,
    which has the same methods. A `ConfigurationError` for other schemes."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)):
        raise ConfigurationError(f"{path!r} is no path to keep checkpoints at")
    if "://" not in text:
        return Path(path)
    if not text.startswith("gs://"):
        raise ConfigurationError(
            f"{text}: checkpoints are kept in local folders and on gs://; Orbax writes to no other "
            f"remote place. Mount "
            "it as a folder, and give that"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigurationError(f"{text} needs gcsfs: pip install 'fulgurite-checkpoint[gcs]'")
    from etils import epath
    from etils.epath import backend

    # What gcsfs remembers of a folder misses what Orbax, or another process, writes there.
    backend.fsspec_backend.fs(text).dircache.use_listings_cache = False
    return epath.Path(text)  # type: ignore[return-value]


def get_checkpoint_folder(root: Path) -> Path:
    """Where the checkpoints of the run at `root` are."""
    folder = root / "checkpoints"
    if is_link(folder):
        raise CheckpointError(
            f"{folder} is a link, of which a run directory has none: put the folder itself there"
        )
    return folder


def list_entries(root: Path) -> list[Entry]:
    """The checkpoints of the run at `root`, oldest first, damaged ones included. Links and other
    names are passed over."""
    folder, found = get_checkpoint_folder(root), []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if commit := complete_saving(path):
            found.append(Entry(commit.step, path, commit))
        elif match and not is_link(path) and path.is_dir():
            try:
                found.append(Entry(int(match[1]), path, read_commit(path)))
            except Damaged as error:
                found.append(Entry(int(match[1]), path, None, str(error)))
    return sorted(found, key=lambda entry: entry.step)


def complete_saving(path: Path) -> Commit | None:
    """The commit of a checkpoint that is complete and was about to take the place of an earlier one
    of its step, which is out of the way already."""
    name = path.name.removeprefix("saving-")
    if (
        name == path.name
        or not STEP.fullmatch(name)
        or is_link(path)
        or path.with_name(name).exists()
    ):
        return None
    try:
        return read_commit(path)
    except Damaged:
        return None


def find_best(found: list[Entry], metric: str, mode: str) -> Entry | None:
    """The first of the complete checkpoints that no later one beats; those without the metric, or
    with NaN, are not considered."""
    best: tuple[float, Entry] | None = None
    for entry in found:
        value = entry.value(metric)
        if value is not None and (
            best is None or (value > best[0] if mode == "max" else value < best[0])
        ):
            best = value, entry
    return best[1] if best else None


def read_commit(path: Path) -> Commit:
    """The commit of the checkpoint in the directory `path`."""
    kept = read_json(path / "COMMIT")
    try:
        content: dict[str, Any] = {name: value for name, value in kept.items() if name != "sha256"}
        if kept["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {kept['format']!r}; this version reads {FORMAT}"
            )
        if kept["sha256"] != _digest(dumps(content).encode()):
            raise Damaged(f"{path / 'COMMIT'} is not as it was written")
        del content["format"]
        content["best"] = content["best"] and tuple(content["best"])
        commit = Commit(**content)
        kinds = (int, int, list, list, dict, tuple | None, dict, float)
        if not all(map(isinstance, vars(commit).values(), kinds)) or not all(
            isinstance(one, dict) for one in (*commit.positions, *commit.metrics.values())
        ):
            raise TypeError("a value of another kind")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{path / 'COMMIT'} is no commit of ours: {error}") from error
    if type(commit.step) is not int or path.name not in (
        f"step-{commit.step}",
        f"saving-step-{commit.step}",
    ):
        raise Damaged(f"{path / 'COMMIT'} is of step {commit.step!r}")
    return commit


def write_commit(path: Path, commit: Commit) -> None:
    """Writes `COMMIT` into the directory `path`, durably."""
    content = loads(dumps({"format": FORMAT} | asdict(commit)))
    write(path / "COMMIT", dumps(content | {"sha256": _digest(dumps(content).encode())}).encode())


def verify(path: Path, commit: Commit, how: Verify, names: re.Pattern[str] | None = None) -> None:
    """Compares the files of a checkpoint with their hashes, or those alone whose names match
    `names`; raises `Damaged`."""
    there = dict(files(path))
    for process, digest in enumerate(commit.hashes):
        hashes = there.get(f"hashes-{process}.json")
        if hashes is None:
            raise Damaged(f"{path} lacks hashes-{process}.json")
        raw = _read(hashes)
        if _digest(raw) != digest:
            raise Damaged(f"{hashes} is not as it was written")
        for name, kept in _parse_commit(raw, hashes).items():
            if names is not None and not names.fullmatch(name):
                continue
            if name not in there:
                raise Damaged(f"{path} lacks {name}")
            size = get_size(there[name])
            if not isinstance(kept, list) or len(kept) != 2:
                raise Damaged(f"{hashes} holds what no file of ours does: {kept!r}")
            if size != kept[0]:
                raise Damaged(f"{there[name]} has {size} bytes; it was written with {kept[0]}")
            if how == "full" and list(checksum(there[name])) != kept:
                raise Damaged(f"{there[name]} is not as it was written")


def write_hashes(path: Path, process: int, count: int) -> str:
    """Writes the hashes of everything in `path` that the process wrote, durably; gives their
    SHA-256."""
    hashes = {}
    for name, file in files(path):
        if _writer(name, count) == process and not name.startswith("hashes-"):
            size, crc = checksum(file)
            hashes[name] = [size, crc]
            sync(file)
    raw = dumps(hashes).encode()
    write(path / f"hashes-{process}.json", raw)
    return _digest(raw)


def files(path: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """The files below a directory by their names, `/` between the parts. A link is damage: we make
    none."""
    for child in sorted(path.iterdir(), key=lambda child: child.name):
        if is_link(child):
            raise Damaged(f"{child} is a link; a checkpoint holds none")
        if child.is_dir():
            yield from files(child, f"{prefix}{child.name}/")
        elif child.is_file():
            yield f"{prefix}{child.name}", child


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def get_size(path: Path) -> int:
    """The bytes of a file."""
    found: Any = path.stat()
    return found.st_size if isinstance(path, Path) else found.length


def read_json(path: Path) -> Any:
    """The content of a JSON file of ours. `Damaged` if it is missing, too large or no JSON."""
    return _parse_commit(_read(path), path)


def write(path: Path, raw: bytes) -> None:
    """Writes a file such that it is there with all of its content, durably, or not at all."""
    if not isinstance(path, Path):
        path.write_bytes(raw)  # an object appears whole
        return
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(raw)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Has the system write a local file or directory to the disk."""
    if isinstance(path, Path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_link(path: Path) -> bool:
    """Whether a path is a symbolic link; remote ones are none."""
    return isinstance(path, Path) and path.is_symlink()


def _read(path: Path) -> bytes:
    try:
        if isinstance(path, Path) and not stat.S_ISREG(path.lstat().st_mode):
            raise Damaged(f"{path} is no regular file")
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if len(raw) > LIMIT:
        raise Damaged(f"{path} is larger than {LIMIT:,} bytes")
    return raw


def _parse_commit(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        kept = loads(raw)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is no JSON of ours: {error}") from error
    if not isinstance(kept, dict):
        raise Damaged(f"{path} is no JSON of ours: it holds no object")
    return kept


def _writer(name: str, count: int) -> int:
    """Which process wrote a file: Orbax puts those of process P below `ocdbt.process_P`, we into
    files of that number, and the first process writes the rest."""
    found = re.search(
        r"(?:^host-|/ocdbt\.process_|/array_metadatas/process_)([0-9]+)(?:\.json$|/|$)", name
    )
    return int(found[1]) if found and int(found[1]) < count else 0


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
