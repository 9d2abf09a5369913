"""A program with a bad batch at step 38, for tests of the commands of fulgurite-replay."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run
from fulgurite_replay import StateDigest

BAD_STEP, BAD_EXAMPLE = 38, 5


class Weighted(fg.Module):
    """A linear regression whose examples have weights."""

    layer: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = 0.01 * jax.random.normal(ctx.key(), batch["y"].shape)
        errors = jax.vmap(self.layer)(batch["x"])[:, 0] + noise - batch["y"]
        return fg.Output(jnp.mean(jnp.sqrt(batch["weight"]) * errors**2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Jitter:
    """Changes the batches with random keys of its own."""

    @fg.hookimpl
    def transform_batch(self, batch: Any, ctx: fg.Context) -> Any:
        noise = 0.1 * jax.random.normal(ctx.key(), batch["x"].shape)
        return {**batch, "x": batch["x"] + noise}


def make_batches(is_bad: bool) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    batches = [
        {
            "x": rng.normal(size=(8, 3)).astype(np.float32),
            "y": rng.normal(size=8).astype(np.float32),
            "weight": rng.uniform(0.5, 1, size=8).astype(np.float32),
        }
        for _ in range(60)
    ]
    if is_bad:
        batches[BAD_STEP - 1]["weight"][BAD_EXAMPLE] = -1
    return batches


def experiment(is_bad: bool = True, steps: int = 50, rate: float = 0.9) -> Experiment:
    engine = fg.Engine(
        steps=steps,
        log_every=1,
        plugins=[
            Checkpointer(every=10, max_to_keep=None),
            "jsonl",
            StateDigest(every=10),
            Average(EMA(rate)),
            Jitter(),
            "replay_hint",
        ],
    )
    return Experiment(engine, Weighted, make_batches(is_bad))


if __name__ == "__main__":
    run(experiment)
