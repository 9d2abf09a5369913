"""Run by test_hosts.py in several processes: evaluations and predictions of one model over data
that differ in length.

Each process prints what it found as JSON, one line each.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_evaluators import Evaluator
from fulgurite_metrics import F1, RocAuc
from fulgurite_sharding import CoordinatedSync, MeshStrategy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Batch = dict[str, np.ndarray]


class Scores(fg.Module):
    """Takes the scores in a batch as logits."""

    scale: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.scale = jnp.ones(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits, labels = batch["scores"] * self.scale, batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return fg.Output(jnp.mean(losses, where=ctx.mask), preds=logits)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output, labels = self.training_step(batch, ctx), batch["label"]
        metrics = {
            "accuracy": fg.metrics.Accuracy.from_logits(output.preds, labels, ctx.mask),
            "f1": F1.from_predictions(output.preds, labels, mask=ctx.mask, average="macro"),
            "auc": RocAuc.from_scores(
                output.preds[:, 1] - output.preds[:, 0], labels == 1, mask=ctx.mask
            ),
            "largest": fg.metrics.Max.from_values(output.preds, ctx.mask),
        }
        return output.replace(metrics=metrics)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class HostsStrategy(MeshStrategy):
    """Divides batches, or keeps them whole on every device."""

    def __init__(self, batch_spec: PartitionSpec) -> None:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        super().__init__(mesh, CoordinatedSync(timeout=60))
        self.batch_spec = batch_spec

    def get_state_shardings(self, state: fg.TrainState) -> Any:
        return jax.tree.map(
            lambda leaf: self.replicated if isinstance(leaf, jax.ShapeDtypeStruct) else None, state
        )

    def get_batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, self.batch_spec), batch)


class Hosts:
    """A mesh over all processes that divides batches."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return HostsStrategy(PartitionSpec("data"))


def examples() -> Batch:
    """103 of three classes, with ties."""
    rng = np.random.default_rng(7)
    label = rng.integers(0, 3, 103).astype(np.int32)
    scores = np.round(rng.normal(size=(103, 3)) + 1.5 * np.eye(3)[label], 1).astype(np.float32)
    return {"scores": scores, "label": label}


def batches(process: int, processes: int) -> list[Batch]:
    """Every `processes`-th batch of 16, so that the last ones are missing or short on some."""
    cut = [
        {name: array[start : start + 16] for name, array in examples().items()}
        for start in range(0, 103, 16)
    ]
    return cut[process::processes]


def failing(process: int) -> Iterator[Batch]:
    yield examples()
    if process == 1:
        raise OSError("the disk is gone")
    yield examples()


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Whole(Hosts):
    """Batches are whole on every device instead."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return HostsStrategy(PartitionSpec())


class Own(Scores):
    """Begins with another weight in each process."""

    def __init__(self) -> None:
        self.scale = jnp.float32(jax.process_index())


class Custom(Evaluator):
    """An evaluation that may fail, and does on one process at its second time."""

    def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
        if step > 1 and jax.process_index() == 1:
            raise OSError("the file is gone")
        return super().evaluate(state, step)


def print_error(do: Callable[[], Any]) -> None:
    try:
        do()
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")


def main() -> None:
    process, processes = jax.process_index(), jax.process_count()
    mine = batches(process, processes)
    evaluator = Evaluator("test", mine, every=2)
    engine = fg.Engine(steps=2, plugins=[Hosts(), evaluator], autoload=False)
    say(
        evaluated=engine.evaluate(Scores(), mine),
        limited=engine.evaluate(Scores(), iter(mine), num_batches=1)["loss"],
    )
    padded = fg.ArrayData(examples(), 16, remainder="pad")
    say(padded=engine.evaluate(Scores(), padded))
    handed: list[np.ndarray] = []
    preds = engine.predict(Scores(), mine)
    engine.predict(Scores(), mine, callback=handed.append)
    say(predicted=preds.tolist(), handed=[len(part) for part in handed])
    assert np.array_equal(np.concatenate(handed), preds)
    train = fg.ArrayData({name: array[:96] for name, array in examples().items()}, 16)
    result = engine.fit(Scores, train)
    say(along=result.metrics["test"], after=engine.evaluate(result, mine))
    if "failures" in sys.argv:
        evaluate = partial(engine.evaluate, Scores())
        print_error(lambda: evaluate(failing(process)))
        print_error(lambda: evaluate([] if process == 1 else mine))
        print_error(lambda: evaluate([{"scores": examples()["scores"]}] if process == 1 else mine))
        plain, batch, other = (
            fg.Engine(steps=3, plugins=[Hosts()], autoload=False),
            mine[0],
            mine[process],
        )
        print_error(
            lambda: fg.Engine(steps=1 + process, plugins=[Hosts()], autoload=False).fit(
                Scores, train
            )
        )
        print_error(
            lambda: fg.Engine(steps=1, seed=process, plugins=[Hosts()], autoload=False).fit(
                Scores, train
            )
        )
        print_error(lambda: plain.fit(Own(), train))
        print_error(
            lambda: plain.fit(
                Scores, [{name: array[: 8 + process] for name, array in batch.items()}]
            )
        )
        print_error(lambda: plain.fit(Scores, [batch] * (1 + process)))
        print_error(
            lambda: fg.Engine(steps=1, plugins=[Whole()], autoload=False).fit(Scores, [other])
        )
        custom = fg.Engine(
            steps=3,
            plugins=[Hosts(), Custom("own", [examples()], 1, raise_on_error=False)],
            autoload=False,
        ).fit(Scores, [batch])
        say(error=custom.failures["evaluate.own"])
        say(again=engine.evaluate(Scores(), mine)["loss"])


if __name__ == "__main__":
    main()
