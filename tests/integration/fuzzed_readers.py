"""The readers of files that may be damaged or hostile, each with a file that the real writer wrote,
and what is in it."""

import io
import json
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import optax
import wandb
from edits import update_hashes, write_signed
from fulgurite_checkpoint import Checkpointer, commands, format, inspecting, restoring
from fulgurite_checkpoint.files import compute_sha256
from fulgurite_cli.programs import read_argument_names
from fulgurite_cli.start_config import read_config_file, read_run_config
from fulgurite_config import L, from_json, to_json
from fulgurite_evaluators import EvaluationRecord, read_results
from fulgurite_evaluators.results import ResultWriter
from fulgurite_logging import CSVLogger, JSONLLogger, iter_records, iter_telemetry
from fulgurite_logging.jsonl import JSONLBackend
from fulgurite_logging.plot import load_evaluations, load_series
from fulgurite_logging.table import CSVBackend
from fulgurite_mlflow.backend import RunNote, _write_note, read_run_id
from fulgurite_replay import (
    Captured,
    PinPrograms,
    StateDigest,
    bisect,
    read_capture,
    read_digests,
    read_programs,
)
from fulgurite_replay.capture_files import write_capture
from fulgurite_replay.skipping import read_skipped
from fulgurite_runs import RunDirectory, read_origin, write_origin
from fulgurite_runs.directory import hash_commit
from fulgurite_runs.lock import check_unused, read_owner
from fulgurite_runs.program import _find_project, format_program
from fulgurite_sharding.profiles import read_profile
from fulgurite_tensorboard import TensorBoardLogger, read_events
from fulgurite_tensorboard.events import truncate_events
from fulgurite_wandb import read_run
from fulgurite_wandb.backend import Backend, _iter_records
from fulgurite_wandb.runfile import find_last_step
from fuzzed_formats import EVENTS, JSON, JSON_LINES, LOG, TABLE, TEXT, TOML, Frames, Values

STEPS = 3
LOGGED = [1, 2, 3]
"""The steps of the records."""
RUN_ID = "c0ffee00c0ffee00c0ffee00c0ffee00"
PROFILE = """processes = 2
nodes = 3
command = ["srun", "--nodes={nodes}"]
environment = {A = "b"}
"""
PROGRAM = '''"""A program."""

def experiment(width: int = 3, *, rate: float = 0.1):
    return None
'''


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch @ self.weight - 1) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2)


def write_run(path: Path) -> None:
    """Train for three steps with everything that writes files, and evaluate as another process
    would."""
    batches = np.random.default_rng(0).normal(size=(STEPS, 5, 4)).astype(np.float32)
    plugins = [
        Checkpointer(1, max_to_keep=2, monitor="train/loss", mode="min"),
        JSONLLogger(),
        CSVLogger(),
        TensorBoardLogger(),
        PinPrograms(),
        StateDigest(every=1),
    ]
    engine = fg.Engine(run_dir=path, steps=STEPS, log_every=1, plugins=plugins, autoload=False)
    engine.config = {"width": 3, "rate": 0.1}
    result = engine.fit(Line, fg.DataSource(list(batches)))
    batch = {"x": [batches[0]], "mask": (np.ones(5, bool), None)}
    captured = Captured(STEPS, "the loss", fg.StepRange(0, STEPS), batch, result.state)
    write_capture(path, captured)
    write_origin(path, path.parent / "other", 1, [2])
    run = RunDirectory(path)
    (path / "evaluations").mkdir()
    results = ResultWriter(run, "side")
    for step, checkpoint in run.list_checkpoints():
        digest = hash_commit(checkpoint)
        assert digest is not None
        record = EvaluationRecord("test", step, digest, {"loss": 1.5, "counts": np.arange(2)})
        results.append(record, {"jsonl": {"records.jsonl": 10}})
    results.close()
    # Not by a logger, which gives up where wandb takes 30 s to begin.
    rows = Backend({"project": "tests", "id": "fuzzed"}, "offline", path, 60.0, None, lambda: None)
    for step in LOGGED:
        rows.write(fg.Record("scalars", "train", step, {"loss": 1 / step}))
    rows.close()
    wandb.teardown()  # its process may write the rows after the end of the run
    _write_note(path, RunNote(RUN_ID, "f" * 32))
    (path / "fulgurite.toml").write_text(f"[profiles.a]\n{PROFILE}")
    project = '[project]\nname = "digits"\nversion = "0.1"\n'
    (path / "pyproject.toml").write_text(f"{project}[tool.fulgurite.profiles.a]\n{PROFILE}")
    (path / "train.py").write_text(PROGRAM)
    (path / "config.json").write_text(to_json(make_config()))
    shutil.copy(next(path.glob("tensorboard/train/*tfevents*")), path / "events")
    shutil.copy(next(path.glob("wandb/offline-run-*/*.wandb")), path / "run.wandb")


def make_config() -> Any:
    """Return a configuration with everything that has a form of its own in JSON."""
    cfg = L(rate=0.1, sizes=(1, 2), limit=float("inf"), path=Path("a/b"), names={1: "one"})
    cfg.model = L(dict, width=3, inner=L(list, [1, 2]))
    cfg.again = cfg.model
    cfg.double = cfg.ref.rate * 2
    return cfg


@dataclass(frozen=True)
class Reader:
    """What reads a file.

    Attributes:
        file: the path below the run.
        format: how its content can be edited.
        read: reads the file and returns what is in it, as far as that is compared.
        expected: what `read` returns for the file as it was written.
        repair: makes hashes fit after an edit.
    """

    file: str
    format: Values | Frames
    read: Callable[[Path], Any]
    expected: Any
    repair: Callable[[Path], None] | None = None


CHECKPOINT = f"checkpoints/step-{STEPS}"


def sign_commit(path: Path) -> None:
    commit = json.loads(path.read_text())
    hashes = commit.get("hashes") if isinstance(commit, dict) else None
    write_signed(path, commit, hashes[0] if isinstance(hashes, list) and hashes else "")


def sign_hashes(path: Path) -> None:
    commit = json.loads((path.parent / "COMMIT").read_text())
    write_signed(path.parent / "COMMIT", commit, compute_sha256(path.read_bytes()))


def sign_file(path: Path) -> None:
    update_hashes(path.parent)


def read_commit(path: Path) -> Any:
    commit = format.read_commit(path.parent)
    entry = format.Entry(commit.step, path.parent, commit)
    loss = entry.get_metric("train/loss")
    return commit.step, commit.attempt, len(commit.hashes), list(commit.metrics), type(loss)


def verify_checkpoint(path: Path) -> Any:
    commit = format.read_commit(path.parent)
    format.verify_files(path.parent, commit, "full")
    return len(json.loads(path.read_bytes())) > 5


def read_checkpoint(path: Path) -> Any:
    entry = format.Entry(STEPS, path.parent, format.read_commit(path.parent))
    checkpoint = restoring.read_checkpoint(entry, "full")
    state: Any = None  # its arrays are files of another kind
    snapshot = checkpoint.contents.make_snapshot(state)
    inspecting.format_checkpoint(checkpoint)
    return len(snapshot.history), snapshot.step_range.stop, len(checkpoint.manifest["plugins"])


def print_command(command: Callable[[list[str]], int], *arguments: str) -> Any:
    """Return the exit code of a command that only reads, and how many lines it prints."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        code = command(list(arguments))
        output.flush()
        return code, output.buffer.getvalue().count(b"\n")  # type: ignore[attr-defined]


def list_checkpoints(path: Path) -> Any:
    root = str(path.parents[2])
    print_command(commands.checkpoints, root, "--json")
    return print_command(commands.checkpoints, root)


def list_runs(path: Path) -> Any:
    root = path.parent if path.name == "lock" else path.parents[1]
    print_command(commands.runs, str(root), "--json")
    print_command(commands.runs, str(root), "--csv")
    print_command(commands.compare, str(root), str(root))
    return print_command(commands.runs, str(root), "--show", "train/loss")


def read_manifest(path: Path) -> Any:
    manifest = RunDirectory(path.parents[1]).read_manifest()
    program = manifest.get("program")
    if isinstance(program, dict):
        format_program(program)
    return read_run_config(str(path.parents[1])), len(manifest) > 5


def read_lock(path: Path) -> Any:
    check_unused(path)
    owner_and_heartbeat = read_owner(path)
    if owner_and_heartbeat is None:
        return None
    owner, _ = owner_and_heartbeat
    return str(owner).startswith("attempt 1, process "), owner.is_running(time.time()), owner.ended


def read_telemetry(path: Path) -> Any:
    steps = [record.step for record in iter_telemetry(path.parent)]
    return min(steps, default=None), max(steps, default=None)


def read_series(path: Path) -> Any:
    steps, values = load_series(path.parent).get("train/loss", ([], []))
    return steps, len(values)


def read_evaluations(path: Path) -> Any:
    run = path.parents[1]
    records = read_results(run)
    return [record.step for record in records], [step for _, step, _ in load_evaluations(run)]


def append_result(path: Path) -> Any:
    writer = ResultWriter(RunDirectory(path.parents[1]), "side")
    writer.close()
    return len(writer.done), writer.last_step, writer.logger_state


def read_profile_a(path: Path) -> Any:
    profile, _ = read_profile("a", path)
    return profile.processes, profile.fill_command("a"), dict(profile.environment)


def read_positions(run: Path) -> Any:
    return format.read_commit(run / CHECKPOINT).logger_positions[0]


def rewind_table(path: Path) -> Any:
    return open_table(path.parent, read_positions(path.parent)["csv"])


def rewind_to_position(path: Path) -> Any:
    run = path.parents[2]
    positions = read_positions(run)
    JSONLBackend(run, positions.get("jsonl")).close()
    return open_table(run, positions.get("csv"))


def open_table(folder: Path, position: Any) -> Any:
    backend = CSVBackend(folder, position)
    rows = backend.get_position()["records.csv"]["rows"]
    # A name that is new has the whole table read and written again.
    backend.write(fg.Record("scalars", "new", 9, {"name": 1.0}))
    backend.close()
    return rows


def rewind_records(path: Path) -> Any:
    positions = read_positions(path.parent)
    backend = JSONLBackend(path.parent, positions["jsonl"])
    size = backend.get_position()
    backend.close()
    return size == positions["jsonl"]


def read_steps_of_events(path: Path) -> Any:
    return [event.step for _, event in read_events(path)]


def cut_events(path: Path) -> Any:
    ends = [end for end, _ in read_events(path)]
    truncate_events(path, ends[1] if len(ends) > 1 else 40)
    return len(ends), len([end for end, _ in read_events(path)])


def read_wandb(path: Path) -> Any:
    num_rows = sum(record.HasField("history") for record in read_run(path))
    return num_rows, find_last_step(path)


def send_missing(path: Path) -> Any:
    return [record.step for record in _iter_records(path, path.stat().st_size)]


def read_captured(path: Path) -> Any:
    captured = read_capture(path.parent)
    return captured.step, captured.step_range.stop, len(jax.tree.leaves(captured.batch))


def read_pinned(path: Path) -> Any:
    return [(program.name, program.attempt) for program in read_programs(path.parent)]


def compare_digests(path: Path) -> Any:
    str(bisect(path.parent, path.parent))
    return list(read_digests(path.parent))


def read_fork(path: Path) -> Any:
    return read_origin(path.parent).get("step"), read_skipped(path.parent)


def read_configuration(path: Path) -> Any:
    cfg = from_json(path.read_text(errors="replace"))
    return json.loads(to_json(cfg)) == json.loads(to_json(make_config()))


def start_from(path: Path) -> Any:
    return list(read_config_file(str(path)))


READERS: dict[str, Reader] = {
    "commit": Reader(
        f"{CHECKPOINT}/COMMIT", JSON, read_commit, (STEPS, 1, 1, ["train"], float), sign_commit
    ),
    "list of checkpoints": Reader(
        f"{CHECKPOINT}/COMMIT", JSON, list_checkpoints, (0, 4), sign_commit
    ),
    "hashes": Reader(f"{CHECKPOINT}/hashes-0.json", JSON, verify_checkpoint, True, sign_hashes),
    **{
        f"{name} of a checkpoint": Reader(
            f"{CHECKPOINT}/{name}.json", JSON, read_checkpoint, (STEPS, STEPS, 6), sign_file
        )
        for name in ("index", "manifest", "host-0", "history")
    },
    "manifest": Reader("attempts/1", JSON, read_manifest, ({"width": 3, "rate": 0.1}, True)),
    "list of runs": Reader("attempts/1", JSON, list_runs, (0, 2)),
    "lock": Reader("lock", JSON, read_lock, (True, False, True)),
    "capture": Reader(
        f"captures/step-{STEPS}/capture.json", JSON, read_captured, (STEPS, STEPS, 2)
    ),
    "pinned programs": Reader("programs.jsonl", JSON_LINES, read_pinned, [("step", 1)]),
    "digests": Reader("digests.jsonl", JSON_LINES, compare_digests, LOGGED),
    "origin of a fork": Reader("origin.json", JSON, read_fork, (1, (2,))),
    "list of locked runs": Reader("lock", JSON, list_runs, (0, 2)),
    "configuration file": Reader("config.json", JSON, start_from, ["config"]),
    "manifest as a configuration": Reader("attempts/1", JSON, start_from, ["width", "rate"]),
    "configuration": Reader("config.json", JSON, read_configuration, True),
    "results": Reader("evaluations/side.jsonl", JSON_LINES, read_evaluations, (LOGGED, LOGGED)),
    "results to continue from": Reader(
        "evaluations/side.jsonl",
        JSON_LINES,
        append_result,
        (3, 3, {"jsonl": {"records.jsonl": 10}}),
    ),
    "records": Reader(
        "records.jsonl",
        JSON_LINES,
        lambda path: [record.step for record in iter_records(path.parent)],
        LOGGED,
    ),
    "telemetry": Reader("telemetry.jsonl", JSON_LINES, read_telemetry, (0, STEPS)),
    "series": Reader("records.jsonl", JSON_LINES, read_series, (LOGGED, STEPS)),
    "records to continue from": Reader("records.jsonl", JSON_LINES, rewind_records, True),
    "records that wandb lacks": Reader("records.jsonl", JSON_LINES, send_missing, LOGGED),
    "table": Reader("records.csv", TABLE, lambda path: open_table(path.parent, None), STEPS),
    "table to continue from": Reader("records.csv", TABLE, rewind_table, STEPS),
    "positions of loggers": Reader(
        f"{CHECKPOINT}/COMMIT", JSON, rewind_to_position, STEPS, sign_commit
    ),
    "profiles": Reader(
        "fulgurite.toml", TOML, read_profile_a, (2, ["srun", "--nodes=3"], {"A": "b"})
    ),
    "profiles of a project": Reader(
        "pyproject.toml", TOML, read_profile_a, (2, ["srun", "--nodes=3"], {"A": "b"})
    ),
    "project of a program": Reader(
        "pyproject.toml",
        TOML,
        lambda path: _find_project(path.parent / "train.py"),
        ("digits", "0.1"),
    ),
    "arguments of a program": Reader(
        "train.py", TEXT, lambda path: read_argument_names(str(path)), ["width", "rate"]
    ),
    "id at MLflow": Reader("mlflow.json", JSON, lambda path: read_run_id(path.parent), RUN_ID),
    "events": Reader("events", EVENTS, read_steps_of_events, [0, 0, *LOGGED]),
    "cut events": Reader("events", EVENTS, cut_events, (5, 2)),
    "wandb": Reader("run.wandb", LOG, read_wandb, (3, 3)),
}
