"""Exported models of every kind predict what `Engine.predict` does, and plain JAX on the module, where
neither Equinox nor Fulgurite can be imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from elsewhere import Call, compute_elsewhere
from exported_models import VOCABULARY, Ensemble, Normalized, Perceptron, Transformer
from fulgurite_averaging import EMA, Average
from fulgurite_export import export, load
from fulgurite_lora import Lora, merge, remove_adapters

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :3]}
BATCHES = [{name: array[:size] for name, array in BATCH.items()} for size in (1, 7, 64)]
TOKENS = np.random.default_rng(1).integers(VOCABULARY, size=(64, 12)).astype(np.int32)


def make_engine(*plugins: Any, steps: int = 4) -> fg.Engine:
    return fg.Engine(steps=steps, autoload=False, plugins=plugins, log_every=None)


class Case(NamedTuple):
    """A model that is exported.

    Attributes:
        model: what is exported.
        predict: what `Engine.predict` gives for a batch.
        compute: the same by plain NumPy or JAX.
        batches: what is predicted.
        options: of the export.
    """

    model: Any
    predict: Callable[[Any], Any]
    compute: Callable[[Any], Any]
    batches: list[Any] = BATCHES
    options: dict[str, Any] = {}  # noqa: RUF012 - read alone


def make_perceptron() -> Case:
    engine = make_engine()
    result = engine.fit(Perceptron, fg.ArrayData(BATCH, 16))

    def compute(batch: Any) -> Any:
        first, second = result.module.net.layers
        hidden = batch["x"] @ np.asarray(first.weight).T + np.asarray(first.bias)
        return np.maximum(hidden, 0) @ np.asarray(second.weight).T + np.asarray(second.bias)

    return Case(result, lambda batch: engine.predict(result, [batch]), compute)


def make_normalized() -> Case:
    engine = make_engine(steps=8)
    model = eqx.nn.make_with_state(Normalized)
    result = engine.fit(lambda key: model(key=key), fg.ArrayData(BATCH, 16))
    module, state = result.module, result.model_state
    assert state is not None

    def compute(batch: Any) -> Any:
        hidden = batch["x"] @ np.asarray(module.linear.weight).T + np.asarray(module.linear.bias)
        mean, variance = map(np.asarray, state.get(module.norm.ema_state_index))
        scaled = (hidden - mean) / np.sqrt(variance + module.norm.eps)
        scaled = scaled * np.asarray(module.norm.weight) + np.asarray(module.norm.bias)
        return scaled @ np.asarray(module.head.weight).T + np.asarray(module.head.bias)

    return Case(result, lambda batch: engine.predict(result, [batch]), compute)


def make_transformer() -> Case:
    engine = make_engine()
    result = engine.fit(Transformer, [{"tokens": TOKENS[:8]}] * 4)
    sizes = ((64, 12), (7, 1), (1, 7))
    return Case(
        result,
        lambda batch: engine.predict(result, [batch]),
        lambda batch: jax.jit(jax.vmap(result.module.apply_unrolled))(batch["tokens"]),
        [{"tokens": TOKENS[:size, :length]} for size, length in sizes],
        {"shapes": {"tokens": "batch, length"}, "constraints": ["length <= 16"]},
    )


def make_average() -> Case:
    engine = make_engine(Average(EMA(0.5)))
    result = engine.fit(Perceptron, fg.ArrayData(BATCH, 16))
    view = result.view("averaged")

    def compute(batch: Any) -> Any:
        averaged = jax.vmap(view.module.net)(batch["x"])
        assert not np.allclose(averaged, jax.vmap(result.module.net)(batch["x"]), atol=1e-4)
        return averaged

    return Case(view, lambda batch: engine.predict(view, [batch]), compute)


def make_merged() -> Case:
    engine = make_engine(Lora("**", rank=2, scale=2.0))
    result = engine.fit(Perceptron, fg.ArrayData(BATCH, 16))
    merged = remove_adapters(merge(result.module))
    return Case(
        merged,
        lambda batch: engine.predict(result, [batch]),
        lambda batch: jax.vmap(merged.net)(batch["x"]),
    )


def make_ensemble() -> Case:
    engine = make_engine()
    result = engine.fit(Ensemble, fg.ArrayData(BATCH, 16))

    def compute(batch: Any) -> Any:
        members = [
            jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, result.module)
            for i in range(5)
        ]
        return np.mean([jax.vmap(member.members)(batch["x"]) for member in members], axis=0)

    return Case(result, lambda batch: engine.predict(result, [batch]), compute)


def check_cases(cases: dict[str, Case], folder: Path) -> None:
    """Check predictions of exported models, all made in one process that cannot import Equinox."""
    calls, expected = [], []
    for name, case in cases.items():
        export(case.model, folder / name, case.batches[-1], platforms=["cpu"], **case.options)
        for batch in case.batches:
            inputs = {key: value for key, value in batch.items() if key != "y"}
            calls.append(Call(folder / name, "predict", inputs))
            expected.append((case.predict(batch), case.compute(batch)))
    for outputs, values in zip(compute_elsewhere(calls), expected, strict=True):
        for value in values:
            np.testing.assert_allclose(outputs["out"], value, rtol=0, atol=1e-6)


@pytest.mark.full
def test_any_batch_is_predicted_where_equinox_cannot_be_imported(tmp_path: Path) -> None:
    check_cases({"perceptron": make_perceptron()}, tmp_path)


@pytest.mark.full
def test_models_of_every_kind_predict_what_the_engine_does_where_it_cannot_be_imported(
    tmp_path: Path,
) -> None:
    """Statistics of BatchNorm are exported and dropout is off; rotary positions under a scan take
    any length; of an average its view is exported, and of adapters the merged weights."""
    cases = {
        "normalized": make_normalized(),
        "transformer": make_transformer(),
        "average": make_average(),
        "merged": make_merged(),
        "ensemble": make_ensemble(),
    }
    check_cases(cases, tmp_path)
    names = load(tmp_path / "merged").weights.keys()
    assert names == {f"net.layers[{i}].{name}" for i in (0, 1) for name in ("weight", "bias")}
