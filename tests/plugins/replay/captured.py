"""A program whose data is in a file, and has a bad batch at step 18, for tests of captures."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_replay import Capture
from replayed import Weighted

BAD_STEP, BAD_EXAMPLE = 18, 5


class Jitter:
    """Changes the batches with random keys of its own."""

    @fg.hookimpl
    def transform_batch(self, batch: Any, ctx: fg.Context) -> Any:
        noise = 0.1 * jax.random.normal(ctx.key(), batch["x"].shape)
        return {**batch, "x": batch["x"] + noise}


def write_data(path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {
        "x": rng.normal(size=(30, 8, 3)).astype(np.float32),
        "y": rng.normal(size=(30, 8)).astype(np.float32),
        "weight": rng.uniform(0.5, 1, size=(30, 8)).astype(np.float32),
    }
    arrays["weight"][BAD_STEP - 1, BAD_EXAMPLE] = -1
    np.savez(path, **arrays)


def read_data(path: Path) -> list[dict[str, np.ndarray]]:
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    return [{name: column[index] for name, column in columns.items()} for index in range(30)]


def make_engine(*plugins: Any, steps: int = 25, **settings: Any) -> fg.Engine:
    return fg.Engine(
        steps=steps,
        log_every=5,
        autoload=False,
        plugins=[Average(EMA(0.9)), Jitter(), *plugins],
        **settings,
    )


def experiment(path: str) -> Experiment:
    engine = make_engine(Capture(every=9), Checkpointer(every=10), "jsonl")
    return Experiment(engine, Weighted, lambda: read_data(Path(path)))
