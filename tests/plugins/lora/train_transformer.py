"""Trains adapters on the transformer of the examples, fully sharded, and prints a digest of all
arrays.

python train_transformer.py RUN_DIR [STEP_AT_WHICH_IT_IS_KILLED]
"""

import hashlib
import importlib.util
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite_checkpoint import Checkpointer
from fulgurite_logging import JSONLLogger
from fulgurite_lora import Lora
from fulgurite_sharding import FSDP

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformer.py"


def load_example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("transformer", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["transformer"] = module
    spec.loader.exec_module(module)
    return module


class KilledAt:
    """Ends the process as `kill -9` does."""

    def __init__(self, step: int) -> None:
        self.step = step

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(run_dir: str, killed_at: str = "") -> None:
    assert jax.device_count() == 2
    transformer = load_example()
    train, _ = transformer.load_standard_library(17)
    engine = fg.Engine(
        steps=16,
        log_every=4,
        run_dir=run_dir,
        plugins=[
            FSDP(min_size=2**10),
            Lora("blocks[*].attention", rank=4, scale=2.0, dropout=0.1),
            Checkpointer(every=5, async_save=False),
            JSONLLogger(),
            *([KilledAt(int(killed_at))] if killed_at else []),
        ],
    )
    model = partial(transformer.Transformer, 32, 1, 2, 2e-3)
    data = fg.ArrayData(train[:400], 8, shuffle=True, remainder="drop")
    result = engine.fit(model, data, resume="auto")
    digest = hashlib.sha256()
    for array in jax.tree.leaves(eqx.filter((result.module, result.state.opt_state), eqx.is_array)):
        digest.update(np.asarray(array).tobytes())
    weight = result.module.blocks[0].attention.query.weight
    print(
        f"{digest.hexdigest()} shards {len(weight.sharding.device_set)} {weight.is_fully_replicated}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
