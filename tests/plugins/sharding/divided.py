"""Run by test_processes.py in two processes of two devices: evaluates, gathers and compares what
each has alone, and prints what comes of it as JSON."""

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import FulguriteError
from fulgurite_sharding import DataParallel, Sharding, check_replicas, gather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

NUMBERS = np.arange(16, dtype=np.float32)


class Sums(fg.Module):
    """The mean of `x`, times a weight; predicts `x`, or what is drawn of the keys."""

    weight: jax.Array

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = jnp.asarray(weight)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(fg.metrics.Mean.from_values(batch["x"] * self.weight, ctx.mask))

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = fg.metrics.Mean.from_values(batch["x"], ctx.mask)
        return fg.Output(loss, metrics={"bare": jnp.mean(batch["x"])})

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(jax.random.uniform)(batch["key"]) if "key" in batch else batch["x"]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class Lengths(Sums):
    """The mean of `x`, as a bare number."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch["x"]) * self.weight)


class Keys:
    """Examples with keys, computed by JAX as they are read: 8 and 4 on the first process, 3 on the
    second."""

    def __iter__(self) -> Iterator[Any]:
        process = jax.process_index()
        for number, size in enumerate([[8, 4], [3]][process]):
            key = jax.random.key(10 * process + number)
            yield {"x": jnp.arange(size, dtype=jnp.float32), "key": jax.random.split(key, size)}


def make_mesh(order: list[int]) -> Mesh:
    return Mesh(np.asarray(jax.devices())[order], ("data",), axis_types=(AxisType.Auto,))


def make_engine(sharding: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=[sharding], autoload=False, **{"steps": 2, **settings})


def catch(run: Callable[[], Any]) -> Any:
    """Return what a function returns, or its error."""
    try:
        return run()
    except FulguriteError as error:
        return f"{type(error).__name__}: {error}"


def predict_keys() -> Any:
    data = fg.DataSource(Keys(), prefetch=0)
    engine = make_engine(DataParallel())
    return engine.evaluate(Sums(), data)["loss"], engine.predict(Sums(), data).tolist()


def train_keys() -> Any:
    """Train for two steps in a dispatch on batches with keys."""
    key = jax.random.split(jax.random.key(jax.process_index()), 4)
    batches = [{"x": NUMBERS[:4], "key": key}] * 2
    result = make_engine(DataParallel(), steps_per_execution=2).fit(Sums(), batches)
    return result.metrics["train"]["loss"]


def count() -> Any:
    """Batches that count 1 and 4 examples, then 2 and 2."""
    batches = [
        fg.Batch({"x": NUMBERS[:4]}, num_examples=[1, 4][jax.process_index()]),
        fg.Batch({"x": NUMBERS[4:8]}, num_examples=2),
    ]
    engine = make_engine(DataParallel(), log_every=2)
    model: Any = Lengths()  # type: ignore[call-arg]
    trained = engine.fit(model, batches).metrics["train"]["loss"]
    return trained, engine.evaluate(model, batches)["bare"]


def count_on_one() -> Any:
    """Two batches that count on the first process, and one on the second."""
    batches = [fg.Batch({"x": NUMBERS[:4]}, num_examples=2)] * (2 - jax.process_index())
    model: Any = Lengths()  # type: ignore[call-arg]
    return make_engine(DataParallel()).evaluate(model, batches)


def train_on_numbers() -> Any:
    batch = {"x": NUMBERS[:4], "scale": np.float32(jax.process_index())}
    return make_engine(DataParallel()).fit(Sums(), [batch] * 2).metrics


def evaluate_model(weight: float) -> Any:
    data = fg.ArrayData({"x": NUMBERS}, 8)
    return make_engine(DataParallel()).evaluate(Sums(weight), data)


def compare_devices() -> Any:
    """Compare an array of which one device of the second process has another copy."""
    numbers = [[0.0, 0.0], [0.0, 1.0]][jax.process_index()]
    pairs = zip(numbers, jax.local_devices(), strict=True)
    parts = [jax.device_put(np.full(3, number, np.float32), device) for number, device in pairs]
    whole = NamedSharding(make_mesh([0, 1, 2, 3]), P())
    check_replicas({"a": jax.make_array_from_single_device_arrays((3,), whole, parts)})


def use_mesh(order: list[int]) -> Any:
    """Predict and evaluate on a mesh of devices in an order."""
    data = fg.ArrayData({"x": NUMBERS}, 8)
    engine = make_engine(Sharding(make_mesh(order)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluated = engine.evaluate(Sums(), data)
    messages = [str(warning.message) for warning in caught if "could not" in str(warning.message)]
    return engine.predict(Sums(), data).tolist(), evaluated, messages


def use_mesh_of_a_network() -> Any:
    """Predict where JAX orders devices by their network, as on TPUs."""
    with patch.object(jax, "make_mesh", lambda *_, **__: make_mesh([0, 2, 1, 3])):
        engine = make_engine(DataParallel())
    return engine.predict(Sums(), fg.ArrayData({"x": NUMBERS}, 8)).tolist()


def main() -> None:
    process = jax.process_index()
    wide = {"int": np.array([2**40 + process]), "float": np.float64(0.1), "none": np.zeros((0, 2))}
    answers = {
        "keys": predict_keys(),
        "trained on keys": train_keys(),
        "counted": count(),
        "counted on one": catch(count_on_one),
        "numbers": catch(train_on_numbers),
        "models": catch(lambda: evaluate_model(float(process))),
        "gathered": {name: array.tolist() for name, array in gather(wide).items()},
        "compared": catch(compare_devices),
        "reversed": use_mesh([3, 2, 1, 0]),
        "interleaved": catch(lambda: use_mesh([0, 2, 1, 3])),
        "network": use_mesh_of_a_network(),
        "one process": catch(lambda: use_mesh([0, 1])),
    }
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
