"""Run by test_processes.py in two processes: fits with losses that are bare numbers, and prints
what becomes of each as JSON."""

import json
from typing import Any
from unittest.mock import patch

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import FulguriteError
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import GradientAccumulation
from fulgurite_sharding import FSDP, CoordinatedSync, DataParallel
from jax.sharding import PartitionSpec

NUMBERS = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.0, 5.0]], np.float32)
"""The examples of each of the two processes."""


class Root(fg.Module):
    """A weight times the root of the mean square of the batch, or times its mean."""

    weight: jax.Array
    is_mean: bool

    def __init__(self, is_mean: bool) -> None:
        self.weight = jnp.ones(4)
        self.is_mean = is_mean

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        numbers = jax.lax.with_sharding_constraint(batch["x"], PartitionSpec("data"))
        mean = numbers.mean() if self.is_mean else jnp.sqrt((numbers**2).mean())
        return fg.Output(self.weight.mean() * mean)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


class Rooted(Root):
    """Is evaluated by the root of the mean square."""

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = fg.metrics.Mean.from_values(batch["x"], ctx.mask)
        return fg.Output(loss, metrics={"root": jnp.sqrt((batch["x"] ** 2).mean())})


def fit(is_mean: bool, data: Any, *plugins: Any) -> dict[str, Any]:
    """Train for a step, and return the weight, or the error."""
    engine = fg.Engine(steps=1, plugins=plugins, autoload=False)
    try:
        result = engine.fit(Root(is_mean), data)
    except FulguriteError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"weight": float(np.asarray(result.module.weight.addressable_data(0))[0])}


def evaluate(batches: list[Any]) -> dict[str, Any]:
    """Train for two steps with an evaluation after each, whose metric is a bare number that is not
    a mean over examples; return what is said, and how often this process asks the others."""
    evaluator = Evaluator("val", batches, every=1)
    engine = fg.Engine(steps=2, plugins=[DataParallel(), evaluator], autoload=False)
    with patch.object(CoordinatedSync, "reduce_requests", autospec=True) as reduce_requests:
        reduce_requests.return_value = frozenset()
        result = engine.fit(Rooted(True), batches)
    polls = [call.args[1] for call in reduce_requests.call_args_list]
    return {"messages": result.messages, "polls": polls}


def main() -> None:
    """Fit with each kind of loss. In the last case the first process has no examples that differ."""
    batches = [{"x": NUMBERS[jax.process_index()]}] * 2
    same = batches if jax.process_index() else [{"x": np.full(4, 2.0, np.float32)}] * 2
    padded = fg.ArrayData({"x": np.arange(1, 7, dtype=np.float32)}, 4, remainder="pad")
    parallel, accumulation = DataParallel(), GradientAccumulation(2)
    answers = {
        "mean": fit(True, batches, parallel, accumulation),
        "root": fit(False, batches, parallel, accumulation),
        "root on one": fit(False, same, parallel, accumulation),
        "sharded": fit(True, batches, FSDP(min_size=1), accumulation),
        "padded": fit(True, padded, parallel),
        "evaluated": evaluate(same),
    }
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
