"""Arms of `overhead.py` that evaluate and predict: the engine, and loops as one would write them.

All of them run over the same 128 batches, warm, and give the seconds of one batch.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from workloads import Batch, Trained, Workload, compute_loss

BATCHES = 128
IN_FLIGHT = 4


def build_evaluation_arms(workload: Workload, model: Any) -> dict[str, Callable[[], float]]:
    """Return a function for each arm that runs it once.

    Args:
        workload: where the batches come from.
        model: the model without the training contract.
    """
    examples = BATCHES * workload.batch_size
    arrays = {
        name: np.resize(array, (examples, *array.shape[1:]))
        for name, array in workload.arrays().items()
    }
    source = fg.ArrayData(arrays, workload.batch_size)
    engine = fg.Engine(autoload=False)
    module = Trained(model)
    arms = {
        "evaluate": lambda: engine.evaluate(module, source),
        "evaluate by hand": build_hand_evaluation(workload, arrays, model),
        "predict": lambda: engine.predict(module, source),
        "predict by hand": build_hand_prediction(workload, arrays, model),
    }
    values, values_by_hand = arms["evaluate"](), arms["evaluate by hand"]()
    if not np.allclose([values["loss"], values["accuracy"]], values_by_hand, rtol=1e-5):
        raise SystemExit(f"evaluations differ: {values} and {values_by_hand}")
    if not np.allclose(arms["predict"](), arms["predict by hand"](), rtol=1e-5, atol=1e-6):
        raise SystemExit("predictions differ")
    return {name: lambda run=run: measure_batch(run) for name, run in arms.items()}


def measure_batch(run: Callable[[], Any]) -> float:
    """Return the seconds of a batch."""
    before = perf_counter()
    run()
    return (perf_counter() - before) / BATCHES


def slice_batch(arrays: Batch, index: int, size: int) -> Batch:
    """Return one batch, in order."""
    return {name: array[index * size : (index + 1) * size] for name, array in arrays.items()}


def build_hand_evaluation(
    workload: Workload, arrays: Batch, model: Any
) -> Callable[[], tuple[float, float]]:
    """Return the loop that sums loss and hits on the device and reads them at the end."""
    params, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def add(params: Any, totals: Array, batch: Batch) -> Array:
        loss, logits = compute_loss(eqx.combine(params, static), batch)
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return totals + jnp.stack([loss, accuracy])

    def evaluate() -> tuple[float, float]:
        totals = jnp.zeros(2)
        in_flight: deque[Array] = deque()
        for index in range(BATCHES):
            totals = add(params, totals, slice_batch(arrays, index, workload.batch_size))
            in_flight.append(totals)
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        loss, accuracy = np.asarray(totals) / BATCHES
        return float(loss), float(accuracy)

    return evaluate


def build_hand_prediction(
    workload: Workload, arrays: Batch, model: Any
) -> Callable[[], np.ndarray]:
    """Return the loop that reads the predictions of a batch while the next ones are computed."""
    params, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def predict_batch(params: Any, batch: Batch) -> Array:
        return jax.vmap(eqx.combine(params, static))(batch["input"])

    def predict() -> np.ndarray:
        parts: list[np.ndarray] = []
        in_flight: deque[Array] = deque()
        for index in range(BATCHES):
            batch = slice_batch(arrays, index, workload.batch_size)
            in_flight.append(predict_batch(params, batch))
            if len(in_flight) > IN_FLIGHT:
                parts.append(np.asarray(in_flight.popleft()))
        parts += [np.asarray(preds) for preds in in_flight]
        return np.concatenate(parts)

    return predict
