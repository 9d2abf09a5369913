"""Small models and plugins that the tests of evaluators share."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_runs import RunDirectory, RunPlugin


class Counting(fg.Module):
    """One weight that every update makes smaller by exactly 1, whatever the batch: it counts
    updates."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0, metrics={"updates": -self.weight}, preds=batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


class Logits(fg.Module):
    """Takes the batch's logits as they are: metrics of it are those of the data."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = batch["logits"] + 0.0 * self.weight
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        metrics = {"accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"], ctx.mask)}
        return fg.Output(jnp.mean(loss, where=ctx.mask), metrics=metrics, preds=logits)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@dataclass(eq=False)
class Keeper:
    """A checkpointer in memory: keeps the newest snapshot, with copies of its arrays."""

    every: int
    snapshots: dict[int, fg.Snapshot] = field(default_factory=dict)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        self.snapshots[run.step] = _copied(run.snapshot())

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef, template: fg.TrainState
    ) -> fg.Snapshot | None:
        return _copied(self.snapshots[max(self.snapshots)]) if self.snapshots else None


@dataclass(eq=False)
class Logger:
    """Keeps the exact and the other scalars that it is given, apart."""

    exact: list[fg.Record] = field(default_factory=list)
    telemetry: list[fg.Record] = field(default_factory=list)
    text: list[fg.Record] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "text":
            self.text.append(record)
        elif record.kind == "scalars":
            (self.exact if record.stream == "exact" else self.telemetry).append(record)

    def values(self, source: str, name: str) -> list[tuple[int, Any]]:
        return [
            (record.step, record.values[name]) for record in self.exact if record.source == source
        ]


@dataclass(eq=False)
class Act:
    """An action at one step, before the save of that step."""

    step: int
    action: Any

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("act", fg.At(self.step), lambda run: self.action(), "act")]


@dataclass(eq=False)
class Disk(RunPlugin):
    """A checkpointer of one file a step, for other processes to read. What it does is noted in
    `NOTES`."""

    every: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        assert run.run_dir is not None
        target, snapshot = run.run_dir.get_step_directory(run.step), run.snapshot()
        if (target / "COMMIT").exists():
            return
        target.mkdir(parents=True, exist_ok=True)
        paths = jax.tree_util.tree_leaves_with_path(eqx.filter(snapshot.state, eqx.is_array))
        arrays = {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in paths}
        np.savez(target / "arrays.npz", **arrays)  # type: ignore[arg-type]
        rest = {
            "step_range": snapshot.step_range.to_json(),
            "position": snapshot.data_position,
            "pending": list(snapshot.pending_actions),
        }
        (target / "rest.json").write_text(json.dumps({**rest, "metrics": snapshot.metrics}))
        (target / "COMMIT.new").write_text(
            hashlib.sha256((target / "arrays.npz").read_bytes()).hexdigest()
        )
        (target / "COMMIT.new").rename(target / "COMMIT")

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef | str, template: fg.TrainState, engine: fg.Engine
    ) -> fg.Snapshot | None:
        if isinstance(resume, str):  # the command line resumes with "auto"
            resume = fg.CheckpointRef(None)
        path = engine.run_dir if resume.path is None else resume.path
        assert path is not None
        directory = RunDirectory(path)
        if not (checkpoints := directory.list_checkpoints()):
            return None
        # The loss only falls: here the best is the first one.
        steps: dict[Any, Any] = {"latest": checkpoints[-1][0], "best": checkpoints[0][0]}
        step = steps.get(resume.step, resume.step)
        path = directory.get_step_directory(step)
        note(directory.path, f"restores {step}")
        gate(directory.path, f"restore-{step}")
        with np.load(path / "arrays.npz") as arrays:
            state = jax.tree_util.tree_map_with_path(
                lambda keys, leaf: _placed(arrays, keys, leaf), template
            )
        rest = json.loads((path / "rest.json").read_text())
        return fg.Snapshot(
            state,
            fg.StepRange.from_json(rest["step_range"]),
            rest["position"],
            tuple(rest["pending"]),
        )


@dataclass(eq=False)
class Witness:
    """Notes every record and event."""

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        self.path = run.run_dir.path if run.run_dir else None
        self._note("starts")

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        self._note("logs")

    @fg.hookimpl
    def on_evaluate_end(self, source: str) -> None:
        self._note(f"evaluated {source}")

    def _note(self, what: str) -> None:
        if self.path is not None:
            note(self.path, what)


def note(run: Path, what: str) -> None:
    """Notes what this process does, in a file beside the run."""
    with open(run.with_suffix(".notes"), "a") as file:
        file.write(f"{os.getpid()} {what}\n")


def notes(run: Path, pid: int | None = None) -> list[str]:
    """What one process, or any, has noted."""
    file = run.with_suffix(".notes")
    lines = [line.split(" ", 1) for line in file.read_text().splitlines()] if file.exists() else []
    return [what for who, what in lines if pid in (None, int(who))]


def gate(run: Path, name: str) -> None:
    """Waits here while the file NAME is beside the run, put there by a test; says that it does."""
    file = run.parent / name
    if file.exists():
        note(run, f"waits at {name}")
        until(lambda: not file.exists())


def until(condition: Callable[[], Any], seconds: float = 240.0) -> None:
    """Waits for a condition, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def numbers(*batches: Any) -> list[np.ndarray]:
    """A list of batches of float32 numbers."""
    return [np.asarray(batch, np.float32) for batch in batches]


def _plain(leaf: jax.Array) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def _placed(arrays: Any, keys: Any, like: Any) -> Any:
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    array = jnp.asarray(arrays[jax.tree_util.keystr(keys)])
    return (
        jax.random.wrap_key_data(array)
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        else array
    )


def _copied(snapshot: fg.Snapshot) -> fg.Snapshot:
    arrays, static = eqx.partition(snapshot.state, eqx.is_array)
    return replace(snapshot, state=eqx.combine(jax.tree.map(jnp.copy, arrays), static))
