"""A checkpointer that keeps snapshots in memory, as arrays and a JSON text: nothing else
survives."""

import json
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import StateError


@dataclass(frozen=True, eq=False)
class Memory:
    """Saves at the end of a run and wherever a plugin asks for it, each step once.

    Two instances with the same `kept` stand for two starts of one run.

    Example:
        from fulgurite_testing import Memory, TinyModel, tiny_data, tiny_engine

        memory = Memory()
        tiny_engine(memory, steps=4).fit(TinyModel, tiny_data())
        tiny_engine(Memory(memory.kept)).fit(TinyModel, tiny_data(), resume="latest")
    """

    kept: dict[int, tuple[dict[str, np.ndarray], str]] = field(default_factory=dict)
    plugin_name = "memory_checkpoints"

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        """Keeps the snapshot."""
        if run.step in self.kept:
            return
        plugins, snapshot = run.engine.plugins, run.snapshot()
        plugins.call("on_save", run.step, run=run, step=run.step)
        for name, host in snapshot.host_states.items():
            try:
                json.dumps(host, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise StateError(
                    f"plugin {name!r}, hook get_host_state gives what is no JSON ({error}): "
                    f"numbers, texts, lists and "
                    "dicts alone"
                ) from error
        futures = plugins.call("flush_logger", run.step, step=run.step)
        rest = {
            "span": snapshot.step_range.to_json(),
            "position": snapshot.data_position,
            "pending": list(snapshot.pending_actions),
            "host": snapshot.host_states,
            "metrics": jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, snapshot.metrics)),
            "asked": run.requested_length,
            "positions": {plugin.name: future.result() for plugin, future in futures},
        }
        paths = jax.tree_util.tree_leaves_with_path(eqx.filter(snapshot.state, eqx.is_array))
        # Copied: what JAX hands out on the CPU is its own memory, which the next step reuses.
        held = {jax.tree_util.keystr(path): np.array(_plain(leaf)) for path, leaf in paths}
        self.kept[run.step] = held, json.dumps(rest)

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef | str | int, template: fg.TrainState
    ) -> fg.Snapshot | None:
        """Return the snapshot of the newest step, or of the step that `resume` names.

        Args:
            resume: a step, "latest", "auto", or a reference; its path is not looked at.
            template: a state of shapes.
        """
        if not self.kept:
            return None
        step = resume.step if isinstance(resume, fg.CheckpointRef) else resume
        held, text = self.kept[step if isinstance(step, int) else max(self.kept)]
        rest = json.loads(text)
        state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _placed(held, path, leaf), template
        )
        return fg.Snapshot(
            state,
            fg.StepRange.from_json(rest["span"]),
            data_position=rest["position"],
            pending_actions=tuple(rest["pending"]),
            host_states=rest["host"],
            metrics=rest["metrics"],
            requested_length=tuple(rest["asked"]),
        )

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Has the loggers drop what came later."""
        positions = json.loads(self.kept[step][1])["positions"]
        for rewind in run.engine.plugins.implementations("rewind_logger"):
            rewind(step, position=positions[rewind.plugin.name])


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _placed(held: dict[str, np.ndarray], path: Any, like: Any) -> Any:
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    array = jnp.array(held[jax.tree_util.keystr(path)])
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        array = jax.random.wrap_key_data(array)
    return array if like.sharding is None else jax.device_put(array, like.sharding)
