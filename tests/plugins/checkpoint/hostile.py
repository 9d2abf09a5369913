"""Reads hostile run directories below the directory given, watched by an audit hook; prints what
happened as JSON."""

import json
import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from edits import write_commit
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.files import compute_checksum
from trained import ZEROS, Counting, counting, engine

base = Path(sys.argv[1])
victim = base / "victim"
run = base / "runs" / "a" / "b" / "hostile"


class Boom:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {base}/executed",)


def newest() -> Path:
    return run / "checkpoints" / "step-2"


def consistent(change: Any) -> None:
    """Changes the newest checkpoint's small files such that all hashes are right."""
    path = newest()
    hashes = json.loads((path / "hashes-0.json").read_text())
    commit = json.loads((path / "COMMIT").read_text())
    change(path, hashes, commit)
    for name in ("manifest.json", "index.json", "host-0.json"):
        if name in hashes:
            hashes[name] = list(compute_checksum(path / name))
    write_commit(path, hashes, commit)


def names_outside(path: Path, hashes: Any, commit: Any) -> None:
    hashes["../../../../../victim/precious"] = [3, 5]
    hashes[str(victim / "precious")] = [3, 5]


def arrays_outside(path: Path, hashes: Any, commit: Any) -> None:
    index = json.loads((path / "index.json").read_text())
    index["arrays"]["../../../victim/x"] = [[3], "float32"]
    index["arrays"]["module.weight"] = {"$array": [{"a": 1}], "dtype": "O", "shape": [1]}
    (path / "index.json").write_text(json.dumps(index))


def step_outside(path: Path, hashes: Any, commit: Any) -> None:
    commit["step"] = "../../../../../victim"


def plugins_outside(path: Path, hashes: Any, commit: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["plugins"] = [
        {
            "name": "os",
            "distribution": "os",
            "version": "1",
            "decisive": True,
            "settings": {},
            "cls": "os:system",
        }
    ]
    (path / "manifest.json").write_text(json.dumps(manifest))


def set_in(name: str, *keys: str | int, value: Any) -> Any:
    """An attack that puts a value into one of the small files, with right hashes."""

    def change(path: Path, hashes: Any, commit: Any) -> None:
        content = commit if name == "COMMIT" else json.loads((path / name).read_text())
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        if name != "COMMIT":
            (path / name).write_text(json.dumps(content))

    return lambda: consistent(change)


BOMB = {"$array": [], "dtype": "S1000000000", "shape": [0]}
WRONG_VALUES = {
    "bomb": set_in("COMMIT", "metrics", value={"train": {"loss": {**BOMB, "$array": ["x"] * 3}}}),
    "no_positions": set_in("COMMIT", "logger_positions", value=[]),
    "boolean_step": set_in("COMMIT", "attempt", value=True),
    "negative_batch": set_in("host-0.json", "data_position", "batch", value=-3),
    "boolean_batch": set_in("host-0.json", "data_position", "batch", value=True),
    "fraction_of_a_batch": set_in("host-0.json", "data_position", "batch", value=1.5),
    "negative_epoch": set_in("host-0.json", "data_position", "epoch", value=-1),
    "endless_range": set_in("index.json", "step_range", "start", value=10**30),
    "late_start": set_in("index.json", "step_range", "start", value=99),
    "no_settings": set_in("manifest.json", "plugins", 0, "settings", value=None),
    "no_versions": set_in("manifest.json", "versions", value=[1]),
    "no_metrics": set_in("index.json", "metrics", value={"train": 3}),
    "no_states": set_in("host-0.json", "host_states", value={"x": 3}),
    "other_dtype": set_in("index.json", "arrays", "module.weight", value=[[], "int32"]),
    "huge_array": set_in("index.json", "arrays", "module.weight", value=[[10**12], "float32"]),
}
"""What a run never writes, by what it is."""


def cast_array() -> None:
    """Stores an array in another dtype than the index says."""
    from fulgurite_checkpoint import arrays

    path = newest() / "arrays"
    specs = arrays.flatten_state(like)
    stored = arrays.load(path, specs)
    stored["module.weight"] = stored["module.weight"].astype("float16")
    shutil.rmtree(path)
    arrays.start_saving(path, stored).result()

    def rehash(path: Path, hashes: Any, commit: Any) -> None:
        for name in list(hashes):
            if name.startswith("arrays/"):
                del hashes[name]
        for file in sorted((path / "arrays").rglob("*")):
            if file.is_file():
                hashes[str(file.relative_to(path))] = list(compute_checksum(file))

    consistent(rehash)


def pickles() -> None:
    for path in [
        newest() / "index.pkl",
        newest() / "arrays" / "state" / "x.pkl",
        newest() / "manifest.json",
    ]:
        path.write_bytes(pickle.dumps(Boom()))


def large() -> None:
    with open(newest() / "COMMIT", "r+b") as file:
        file.truncate(2**30)


def pipe() -> None:
    (newest() / "COMMIT").unlink()
    os.mkfifo(newest() / "COMMIT")


def linked_step() -> None:
    shutil.copytree(newest(), victim / "step-9")
    (run / "checkpoints" / "step-9").symlink_to(victim / "step-9")
    (run / "checkpoints" / "trash-step-8").symlink_to(victim)
    (run / "checkpoints" / "saving-step-3").symlink_to(victim)


def linked_arrays() -> None:
    (newest() / "arrays").rename(victim / "arrays")
    (newest() / "arrays").symlink_to(victim / "arrays")


def linked_folder() -> None:
    (run / "checkpoints").rename(victim / "checkpoints")
    (run / "checkpoints").symlink_to(victim / "checkpoints")


def deep() -> None:
    (newest() / "index.json").write_text("[" * 100_000)


ATTACKS: dict[str, Any] = {
    **{
        change.__name__: lambda change=change: consistent(change)
        for change in (names_outside, arrays_outside)
    },
    **{
        change.__name__: lambda change=change: consistent(change)
        for change in (step_outside, plugins_outside)
    },
    **{
        attack.__name__: attack
        for attack in (pickles, large, pipe, linked_step, linked_arrays, linked_folder, deep)
    },
    **WRONG_VALUES,
    "cast_array": cast_array,
}

counting(base / "good", steps=2, max_to_keep=None)
checkpoints = Checkpointer(1, max_to_keep=1)
reader = engine(None, checkpoints, steps=1, log_every=None)
like = jax.eval_shape(lambda: reader.init_state(Counting, ZEROS))


def announce(snapshot: fg.Snapshot) -> None: ...


checkpoints.restore_checkpoint(
    fg.CheckpointRef(base / "good"), like, reader, announce
)  # imports everything that reading needs
modules = set(sys.modules)

watching, accesses = False, []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
}
EXECUTES = {
    "exec",
    "compile",
    "pickle.find_class",
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "marshal.loads",
}


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        accesses.append([event, str(arguments[0])])
    elif event in CHANGES or event in EXECUTES or event == "import":
        accesses.append([event, str(arguments[0])])


sys.addaudithook(audit)
report: dict[str, Any] = {}
for name, attack in ATTACKS.items():
    shutil.rmtree(run.parent, ignore_errors=True)
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(base / "good", run)
    victim.mkdir()
    (victim / "precious").write_text("xyz")
    attack()
    before = {str(path): path.stat().st_mtime_ns for path in sorted(victim.rglob("*"))}
    accesses.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watching = True
        try:
            snapshot = checkpoints.restore_checkpoint(fg.CheckpointRef(run), like, reader, announce)
            outcome = float(snapshot.state.module.weight) if snapshot else None
        except CheckpointError as error:
            outcome = f"CheckpointError: {error}"
        watching = False
    reading = list(accesses)
    trained: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trained = float(counting(run, steps=4, max_to_keep=1, resume="auto").module.weight)
        except CheckpointError as error:
            trained = f"CheckpointError: {error}"
    after = {str(path): path.stat().st_mtime_ns for path in sorted(victim.rglob("*"))}
    report[name] = {
        "read": outcome,
        "trained": trained,
        "events": reading,
        "warnings": [str(warning.message) for warning in caught],
        "imported": sorted(set(sys.modules) - modules) if isinstance(outcome, float) else [],
        "untouched": before == after and (victim / "precious").read_text() == "xyz",
        "executed": (base / "executed").exists(),
    }
print(json.dumps(report))
