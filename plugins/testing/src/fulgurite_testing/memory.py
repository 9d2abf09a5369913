"""A checkpointer that keeps snapshots in memory, as arrays and JSON text: nothing else survives."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import StateError
from fulgurite.plugins import TrainingLength

from fulgurite_testing.compare import as_plain_array


@dataclass(frozen=True, eq=False)
class InMemoryCheckpointer(fg.Plugin):
    """Saves at the end of a run and wherever a plugin asks for it, each step once.

    Two instances with the same `checkpoints` stand for two starts of one run.

    Attributes:
        checkpoints: the arrays of the state by path, and the rest as JSON text, by step.

    Example:

        from fulgurite_testing import InMemoryCheckpointer, TinyModel, tiny_data, tiny_engine

        first = InMemoryCheckpointer()
        tiny_engine(first, steps=4).fit(TinyModel, tiny_data())
        second = InMemoryCheckpointer(first.checkpoints)
        tiny_engine(second, steps=8).fit(TinyModel, tiny_data(), resume="latest")
    """

    checkpoints: dict[int, tuple[dict[str, np.ndarray], str]] = field(default_factory=dict)
    plugin_name = "memory_checkpoints"

    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        """Keep the snapshot."""
        if run.step in self.checkpoints:
            return
        hooks = run.engine.plugins.hooks
        snapshot = run.snapshot()
        hooks.on_save.call(run.step, run=run, step=run.step)
        for name, host_state in snapshot.host_states.items():
            _check_json(name, host_state)
        futures = hooks.flush_logger.each(run.step, step=run.step)
        rest = {
            "step_range": snapshot.step_range.to_json(),
            "data_position": snapshot.data_position,
            "pending_actions": list(snapshot.pending_actions),
            "host_states": snapshot.host_states,
            "metrics": jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, snapshot.metrics)),
            "requested_length": run.requested_length,
            "logger_positions": {plugin.name: future.result() for plugin, future in futures},
        }
        leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(snapshot.state, eqx.is_array))
        # Copied: on the CPU JAX returns a view of its own memory, which the next step reuses.
        arrays = {
            jax.tree_util.keystr(path): np.array(as_plain_array(leaf)) for path, leaf in leaves
        }
        self.checkpoints[run.step] = (arrays, json.dumps(rest))

    @fg.hookimpl
    def restore_checkpoint(
        self,
        resume: fg.CheckpointRef | str | int,
        template: fg.TrainState,
        announce: Callable[[fg.Snapshot], None],
    ) -> fg.Snapshot | None:
        """Return the snapshot of the newest step, or of the step that `resume` names.

        Args:
            resume: a step, "latest", "auto", or a reference; its path is not looked at.
            template: a state of shapes.
            announce: called before the arrays are copied.
        """
        if not self.checkpoints:
            return None
        step = resume.step if isinstance(resume, fg.CheckpointRef) else resume
        step = step if isinstance(step, int) else max(self.checkpoints)
        arrays, text = self.checkpoints[step]
        rest = json.loads(text)
        snapshot = fg.Snapshot(
            template.replace(step=np.int32(step)),
            fg.StepRange.from_json(rest["step_range"]),
            data_position=rest["data_position"],
            pending_actions=tuple(rest["pending_actions"]),
            host_states=rest["host_states"],
            metrics=rest["metrics"],
            requested_length=TrainingLength(*rest["requested_length"]),
        )
        announce(snapshot)
        state = jax.tree_util.tree_map_with_path(
            lambda path, spec: _restore_leaf(arrays, path, spec), template
        )
        return replace(snapshot, state=state)

    @fg.hookimpl
    def on_restore(self, run: fg.Run, step: int) -> None:
        """Have the loggers drop what came later.

        Args:
            run: the run.
            step: of the checkpoint.
        """
        positions = json.loads(self.checkpoints[step][1])["logger_positions"]
        run.engine.plugins.hooks.rewind_logger.each(
            step, per_plugin=lambda logger: {"position": positions[logger.name]}
        )


def _check_json(plugin_name: str, host_state: Any) -> None:
    try:
        json.dumps(host_state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"plugin {plugin_name!r}: get_host_state returned something that is not JSON "
            f"({error}): return numbers, strings, lists and dicts only"
        ) from error


def _restore_leaf(arrays: dict[str, np.ndarray], path: Any, spec: Any) -> Any:
    if not isinstance(spec, jax.ShapeDtypeStruct):
        return spec
    array = jnp.array(arrays[jax.tree_util.keystr(path)])
    if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        array = jax.random.wrap_key_data(array)
    return array if spec.sharding is None else jax.device_put(array, spec.sharding)
