"""A checkpoint on disk, and what is read of it without Orbax.

```text
RUN/checkpoints/
    step-N/             a complete checkpoint; it gets this name, by a rename, when it is complete
        COMMIT          JSON: the fields of `Commit`, the format, and SHA-256 of the rest of itself
        hashes-P.json   size and CRC-32 of every file that process P wrote, by name
        manifest.json   what the run is made of (`fulgurite_runs.manifest`)
        index.json      shape and dtype of the arrays by path; the step range, pending actions and
                        newest metrics of the run; whether the position in the data may count from
                        a resume
        history.json    source, step and values of the newest exact scalars
        host-P.json     of process P: the position in its data, the host states of its plugins
        arrays/         an Orbax checkpoint of a flat dictionary: path -> array
    saving-step-N/      one that is being written, or was when its process ended
    trash-step-N/       one that is being removed, or was when its process ended
    damaged-step-N-A/   one that attempt A found incomplete where it had to write
```

`COMMIT` is written last, after everything else is on the disk. Nothing that is read is executed,
and no name that is read from a file is joined to a path: the files there are listed, and looked up
by their names.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fulgurite.errors import CheckpointError
from fulgurite.metrics import Mode, is_better
from fulgurite.plugins import redact_registered
from fulgurite_runs import dumps, encode_readable, get_folder, is_link, loads

from fulgurite_checkpoint.files import (
    DamagedError,
    compute_checksum,
    compute_sha256,
    get_size,
    iter_files,
    parse_json,
    read_bytes,
    read_json,
    sync,
    write_durably,
)
from fulgurite_checkpoint.validation import check_commit_fields

FORMAT = 2
FORMATS = {
    1: "versions from source before 2026-11-23, the last of them the parent of commit 56d256f",
    2: "0.1.0, and versions from source since 2026-11-23",
}
"""Each format, and what writes it: the table of `docs/resume.md`."""
STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,11})")
UNFINISHED_NAME = re.compile(r"(?:saving|trash)-step-(?:0|[1-9][0-9]{0,11})")
SMALL_FILES = re.compile(r"(?:manifest|index|history|host-[0-9]+)\.json")
_PROCESS_FILES = re.compile(
    r"(?:^host-|/ocdbt\.process_|/array_metadatas/process_)([0-9]+)(?:\.json$|/|$)"
)

Verify = Literal["full", "size", "none"]
Monitor = tuple[str, Mode | None]
"""By what the best checkpoint is chosen: a metric `SOURCE/NAME`, and its mode, or None for the
comparison of a program, of which the choice is recorded."""


@dataclass(frozen=True)
class Commit:
    """What `COMMIT` holds.

    Attributes:
        step: the number of completed updates.
        attempt: which start of the run saved it.
        hashes: SHA-256 of the files `hashes-P.json`, in the order of the processes.
        logger_positions: where each logger was, by plugin name, in the order of the processes.
        metrics: those measured at this very step, by source.
        monitor: the metric by which its run chooses the best, as `SOURCE/NAME`, and `min` or `max`,
            or None for a comparison of the program's own; or None.
        timings: seconds by name, over all attempts.
        wall_time: when it was saved, in seconds since 1970.
        run: the directory of its run; None if that has none, or a version saved it that did not
            tell.
        better: the name of such a comparison, or None.
        best: the step of the best checkpoint so far by it; None if there is none.
        telemetry: which of the metrics are telemetry, as `SOURCE/NAME`.
    """

    step: int
    attempt: int
    hashes: list[str]
    logger_positions: list[dict[str, Any]]
    metrics: dict[str, dict[str, Any]]
    monitor: Monitor | None
    timings: dict[str, float]
    wall_time: float
    run: str | None = None
    better: str | None = None
    best: int | None = None
    telemetry: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A directory named like a checkpoint.

    Attributes:
        step: the step in its name.
        path: the directory.
        commit: what its `COMMIT` holds, or None.
        damage: what is wrong with it, where there is no commit.
    """

    step: int
    path: Path
    commit: Commit | None
    damage: str | None = None

    def get_metric(self, metric: str) -> float | None:
        """Return the metric `SOURCE/NAME` measured at its step; None if there is none, or no finite
        number."""
        if self.commit is None:
            return None
        source, _, name = redact_registered(metric).partition("/")
        value = self.commit.metrics.get(source, {}).get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None  # an integer that is larger than any
        return number if math.isfinite(number) else None


def get_checkpoint_folder(root: Path) -> Path:
    """Return the folder with the checkpoints of the run at `root`.

    Raises:
        CheckpointError: there is a link in its place.
    """
    return get_folder(root, "checkpoints")


def list_entries(root: Path) -> list[Entry]:
    """Return the checkpoints of the run at `root`, oldest first, damaged ones included. Links and
    other names are passed over.

    Raises:
        CheckpointError: they may not be read.
    """
    folder = get_checkpoint_folder(root)
    try:
        return sorted(_iter_entries(folder), key=lambda entry: entry.step)
    except PermissionError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read: {error}. Check that you may read them"
        ) from error


def _iter_entries(folder: Any) -> Iterator[Entry]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        commit = read_replacing_commit(path)
        match = STEP_NAME.fullmatch(path.name)
        if commit is not None:
            yield Entry(commit.step, path, commit)
        elif match and not is_link(path) and path.is_dir():
            yield _read_entry(int(match[1]), path)


def _read_entry(step: int, path: Path) -> Entry:
    try:
        return Entry(step, path, read_commit(path))
    except DamagedError as error:
        return Entry(step, path, None, str(error))


def read_replacing_commit(path: Path) -> Commit | None:
    """Return the commit of `saving-step-N` if that is complete and was about to replace an earlier
    checkpoint of its step, which is out of the way already; otherwise None."""
    name = path.name.removeprefix("saving-")
    if name == path.name or not STEP_NAME.fullmatch(name):
        return None
    if is_link(path) or path.with_name(name).exists():
        return None
    try:
        return read_commit(path)
    except DamagedError:
        return None


def find_best(entries: list[Entry], metric: str, mode: Mode | None) -> Entry | None:
    """Return the first of the complete checkpoints that no later one beats; None if none has the
    metric. Those without it, or with a value that is not finite, are not considered.

    Args:
        entries: checkpoints, oldest first.
        metric: `SOURCE/NAME`.
        mode: `max` or `min`; None for the best that the newest checkpoint records.
    """
    if mode is None:
        return find_recorded_best(entries)
    best = None
    best_value = None
    for entry in entries:
        value = entry.get_metric(metric)
        if value is not None and is_better(value, best_value, mode):
            best = entry
            best_value = value
    return best


def find_recorded_best(entries: list[Entry]) -> Entry | None:
    """Return the best checkpoint that the newest complete one records; None if there is none, or if
    it is gone.

    Args:
        entries: checkpoints, oldest first.
    """
    complete = {entry.step: entry for entry in entries if entry.commit}
    newest = complete[max(complete)].commit if complete else None
    return None if newest is None or newest.best is None else complete.get(newest.best)


def read_commit(path: Path) -> Commit:
    """Return the commit of the checkpoint in the directory `path`.

    Raises:
        DamagedError: there is none, or it has changed since it was written.
        CheckpointError: it has another format.
    """
    file = path / "COMMIT"
    content = read_json(file)
    try:
        if content["format"] != FORMAT:
            raise CheckpointError(_describe_other_format(path, content["format"]))
        sha256 = content.pop("sha256")
        if sha256 != compute_sha256(dumps(content).encode()):
            raise DamagedError(f"{file} has changed since it was written")
        del content["format"]
        commit = _parse_commit(content)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DamagedError(f"{file} was not written by fulgurite-checkpoint: {error}") from error
    if path.name not in (f"step-{commit.step}", f"saving-step-{commit.step}"):
        raise DamagedError(f"{file} is of step {commit.step!r}")
    return commit


def _describe_other_format(path: Path, number: Any) -> str:
    writer = FORMATS.get(number) if isinstance(number, int) else None
    if writer is None:
        advice = "this version does not know it: use a later version of fulgurite-checkpoint"
    else:
        advice = f"it is written and read by {writer}: use such a version to resume from it"
    return f"{path} has format {number!r:.100}, and this version reads {FORMAT}; {advice}"


def _parse_commit(content: dict[str, Any]) -> Commit:
    check_commit_fields(content)
    monitor = content["monitor"]
    content["monitor"] = None if monitor is None else tuple(monitor)
    return Commit(**content)


def write_commit(path: Path, commit: Commit) -> None:
    """Write `COMMIT` durably.

    Args:
        path: the directory of the checkpoint.
        commit: what it holds.
    """
    # What is read is what is hashed: a tuple is a list in JSON.
    content = loads(encode_readable({"format": FORMAT} | asdict(commit), "COMMIT"))
    sha256 = compute_sha256(dumps(content).encode())
    write_durably(path / "COMMIT", dumps(content | {"sha256": sha256}).encode())


def verify_files(
    path: Path, commit: Commit, verify: Verify, names: re.Pattern[str] | None = None
) -> None:
    """Compare the files of a checkpoint with their hashes.

    Args:
        path: the directory of the checkpoint.
        commit: its commit.
        verify: whether every byte (`full`) or the size of files is compared.
        names: only files with such names are looked at; None for all.

    Raises:
        DamagedError: a file is missing, or not as it was written.
    """
    paths = dict(iter_files(path))
    for process, sha256 in enumerate(commit.hashes):
        hashes_path = paths.get(f"hashes-{process}.json")
        if hashes_path is None:
            raise DamagedError(f"{path} lacks hashes-{process}.json")
        raw = read_bytes(hashes_path)
        if compute_sha256(raw) != sha256:
            raise DamagedError(f"{hashes_path} has changed since it was written")
        for name, size_and_crc in parse_json(raw, hashes_path).items():
            if names is not None and not names.fullmatch(name):
                continue
            if name not in paths:
                raise DamagedError(f"{path} lacks {name}")
            if not isinstance(size_and_crc, list) or len(size_and_crc) != 2:
                raise DamagedError(f"{hashes_path} holds {size_and_crc!r}, not a size and a CRC-32")
            _verify_file(paths[name], size_and_crc, verify)


def _verify_file(path: Path, size_and_crc: list[Any], verify: Verify) -> None:
    size = get_size(path)
    if size != size_and_crc[0]:
        raise DamagedError(f"{path} has {size} bytes; it was written with {size_and_crc[0]}")
    if verify == "full" and list(compute_checksum(path)) != size_and_crc:
        raise DamagedError(f"{path} has changed since it was written")


def write_hashes(
    path: Path,
    process: int,
    num_processes: int,
    note_file: Callable[[str], None] = lambda name: None,
) -> str:
    """Write the hashes of everything that a process wrote, durably; return their SHA-256.

    Args:
        path: the directory of the checkpoint.
        process: the index of the process.
        num_processes: how many processes write the checkpoint.
        note_file: called with the name of each file before it is read.
    """
    hashes = {}
    for name, file in iter_files(path):
        if _get_writer(name, num_processes) == process and not name.startswith("hashes-"):
            note_file(name)
            hashes[name] = list(compute_checksum(file))
            sync(file)
    name = f"hashes-{process}.json"
    raw = encode_readable(hashes, name).encode()
    write_durably(path / name, raw)
    return compute_sha256(raw)


def _get_writer(name: str, num_processes: int) -> int:
    """Return which process wrote a file.

    Orbax puts those of process P below `ocdbt.process_P`, we into files of that number, and the
    first process writes the rest.
    """
    match = _PROCESS_FILES.search(name)
    if match is None or int(match[1]) >= num_processes:
        return 0
    return int(match[1])
