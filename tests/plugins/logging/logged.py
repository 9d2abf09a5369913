"""A small model, a checkpointer that writes files, and other plugins that the tests of logging
share."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Line(fg.Module):
    """Least squares with three inputs, from a random start, by Adam."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = batch["x"] @ self.weight
        error = (preds - batch["y"]) ** 2
        return fg.Output(error.mean(), metrics={"error": fg.metrics.Mean.from_values(error)})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def data() -> fg.ArrayData:
    """24 examples of three inputs, shuffled, in batches of 8."""
    x = np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": x @ np.asarray([1, -2, 0.5], np.float32)}, 8, shuffle=True)


@dataclass(frozen=True, eq=False)
class Act:
    """A plugin with one scheduled action."""

    trigger: fg.Trigger | int
    action: Callable[[fg.Run], Any]
    instance: str | None = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("act", self.trigger, self.action)]


@dataclass(frozen=True, eq=False)
class Growing:
    """At every second step a record whose names change, with values of all kinds, and one of
    telemetry."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("grow", 2, self.grow)]

    def grow(self, run: fg.Run) -> None:
        values = {f"new_{run.step // 8}": run.step / 3, "nan": float("nan"), "array": np.arange(2)}
        run.log_scalars("growing", values)
        run.log_text("growing", {"note": f"step {run.step}, é"})
        run.log_scalars("growing", {"clock": 1.0}, stream="telemetry")


@dataclass(frozen=True, eq=False)
class Keeper:
    """A checkpointer: every few steps a file of arrays and a file that says the checkpoint is
    there."""

    every: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", self.every, fg.Run.save, "save")]

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        assert run.run_dir is not None
        hooks, snapshot, folder = (
            run.engine.plugins.hooks,
            run.snapshot(),
            run.run_dir.path / "kept",
        )
        positions = {
            logger.name: future.result(60)
            for logger, future in hooks.flush_logger.each(run.step, step=run.step)
        }
        paths = jax.tree_util.tree_leaves_with_path(eqx.filter(snapshot.state, eqx.is_array))
        folder.mkdir(exist_ok=True)
        arrays: dict[str, Any] = {jax.tree_util.keystr(path): _plain(leaf) for path, leaf in paths}
        np.savez(folder / f"{run.step}.npz", **arrays)
        rest = {
            "step_range": snapshot.step_range.to_json(),
            "position": snapshot.data_position,
            "positions": positions,
        }
        (folder / "new").write_text(json.dumps(rest))
        os.replace(folder / "new", folder / f"{run.step}.json")

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef, template: fg.TrainState
    ) -> fg.Snapshot | None:
        assert resume.path is not None
        if (step := newest(Path(resume.path))) is None:
            return None
        folder = Path(resume.path) / "kept"
        rest, arrays = (
            json.loads((folder / f"{step}.json").read_text()),
            np.load(folder / f"{step}.npz"),
        )
        state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _placed(arrays, path, leaf), template
        )
        return fg.Snapshot(state, fg.StepRange.from_json(rest["step_range"]), rest["position"])

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        assert run.run_dir is not None
        positions = json.loads((run.run_dir.path / "kept" / f"{step}.json").read_text())[
            "positions"
        ]
        run.engine.plugins.hooks.rewind_logger.each(
            step, per_plugin=lambda logger: {"position": positions[logger.name]}
        )


def newest(run: Path) -> int | None:
    """The newest step that `Keeper` kept."""
    return max((int(path.stem) for path in (run / "kept").glob("*.json")), default=None)


def _plain(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _placed(arrays: Any, path: Any, like: Any) -> Any:
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    array = jnp.array(arrays[jax.tree_util.keystr(path)])
    return (
        jax.random.wrap_key_data(array)
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        else array
    )
