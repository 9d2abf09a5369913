"""What was trained up to a checkpoint of the running run."""

import time
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError

SECONDS_TO_WAIT = 600.0
"""How long a checkpoint may take to be complete: it is written while training continues."""
_TRAINED = ("module", "model_state", "opt_state")


def read_trained(run: fg.Run, step: int, seconds_to_wait: float) -> fg.TrainState:
    """Return the state of a run with module, model state and optimizer state of its checkpoint.

    Args:
        run: the run.
        step: of the checkpoint.
        seconds_to_wait: how long it may still take to be complete.

    Raises:
        CheckpointError: there is none.
    """
    state = run.state
    template = jax.tree.map(_describe, state)
    names = [name for name in _TRAINED if jax.tree.leaves(getattr(state, name))]
    reference = fg.CheckpointRef(None, step, map={name: name for name in names})
    started = time.monotonic()
    while True:
        try:
            answer = run.engine.plugins.hooks.restore_checkpoint.ask(
                resume=reference,
                template=template,
                engine=run.engine,
                announce=lambda _: None,
            )
            break
        except CheckpointError:
            if time.monotonic() - started >= seconds_to_wait:
                raise
            time.sleep(0.05)
    if answer is None:
        raise CheckpointError(f"no plugin has read the checkpoint of step {step}")
    _, snapshot = answer
    return state.replace(**{name: getattr(snapshot.state, name) for name in names})


def _describe(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
