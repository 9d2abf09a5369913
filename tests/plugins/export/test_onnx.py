"""ONNX files, run by onnxruntime. jax2onnx and onnxruntime are in the extra `onnx` alone."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import Normalized, Perceptron
from fulgurite.errors import ConfigurationError, ModelError

pytestmark = pytest.mark.full
REASON = "jax2onnx and onnxruntime are not installed: uv pip install jax2onnx onnxruntime"

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture
def onnxruntime() -> Any:
    pytest.importorskip("jax2onnx", reason=REASON)
    return pytest.importorskip("onnxruntime", reason=REASON)


def test_a_model_with_batch_norm_runs_in_onnxruntime(onnxruntime: Any, tmp_path: Path) -> None:
    from fulgurite_export import export_onnx

    module, state = eqx.nn.make_with_state(Normalized)(key=jax.random.key(0))
    mean, variance = jnp.arange(8) / 8, 1 + jnp.arange(8) / 4
    norm = module.norm
    assert norm.ema_state_index is not None and norm.ema_first_time_index is not None
    state = state.set(norm.ema_state_index, (mean, variance))
    state = state.set(norm.ema_first_time_index, jnp.array(False))
    batch = {"x": X, "y": X}
    assert export_onnx((module, state), tmp_path / "model.onnx", batch) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["x"]
    for size in (1, 5):
        hidden = X[:size] @ np.asarray(module.linear.weight).T + np.asarray(module.linear.bias)
        scaled = (hidden - np.asarray(mean)) / np.sqrt(np.asarray(variance) + module.norm.eps)
        scaled = scaled * np.asarray(module.norm.weight) + np.asarray(module.norm.bias)
        by_hand = scaled @ np.asarray(module.head.weight).T + np.asarray(module.head.bias)
        (out,) = session.run(None, {"x": X[:size]})
        np.testing.assert_allclose(out, by_hand, atol=1e-5)


def test_labels_that_only_the_loss_reads_are_no_input(onnxruntime: Any, tmp_path: Path) -> None:
    from fulgurite_export import export_onnx

    class Labelled(fg.Module):
        """Predicts by its training step, as a module without `forward` does."""

        scale: Any

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch["x"] * self.scale
            return fg.Output(jnp.mean((preds - batch["y"]) ** 2), preds=preds)

    export_onnx(Labelled(jnp.float32(3)), tmp_path / "model.onnx", {"x": X, "y": X})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (out,) = session.run(None, {"x": X[:3]})
    np.testing.assert_allclose(out, 3 * X[:3], rtol=1e-6)


def test_outputs_of_any_kind_and_name_are_written(onnxruntime: Any, tmp_path: Path) -> None:
    from fulgurite_export import Function, export_onnx

    def classify(module: Any, batch: Any) -> Any:
        x = batch["x"]
        return {"x": 2 * x, "is_positive": x > 0, "inverse": jnp.abs(x) / 0.0, "log": jnp.log(x)}

    module = Perceptron(key=jax.random.key(0))
    file = tmp_path / "new" / "model.onnx"
    x = np.array([[1, -1, 2, -2]], np.float32)
    difference = export_onnx(module, file, {"x": x}, function=Function("classify", classify))
    assert difference < 1e-6
    session = onnxruntime.InferenceSession(file)
    names = [value.name for value in session.get_outputs()]
    assert names == ["inverse", "is_positive", "log", "output.x"]
    outputs = dict(zip(names, session.run(None, {"x": x}), strict=True))
    np.testing.assert_array_equal(outputs["is_positive"], x > 0)
    np.testing.assert_array_equal(outputs["output.x"], 2 * x)
    assert np.isinf(outputs["inverse"]).all() and np.isnan(outputs["log"][0, 1])


def test_what_cannot_be_written_as_onnx_is_an_error_and_no_file(
    onnxruntime: Any, tmp_path: Path
) -> None:
    from fulgurite_export import Function, export_onnx

    module = Perceptron(key=jax.random.key(0))

    def sample(module: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch["x"] + jax.random.normal(ctx.key(), (4,))

    with pytest.raises(ModelError, match="draws random numbers, which an ONNX file cannot"):
        export_onnx(module, tmp_path / "x.onnx", {"x": X}, function=Function("sample", sample))

    def invert(module: Any, batch: Any) -> Any:
        return jnp.linalg.inv(batch["x"][:, :, None] * jnp.eye(4))

    with pytest.raises(ModelError, match="invert cannot be written as ONNX: .*or use export"):
        export_onnx(module, tmp_path / "x.onnx", {"x": X}, function=Function("invert", invert))
    # What jax2onnx replaces while it converts is as it was.
    np.testing.assert_allclose(jax.vmap(module.net)(X), module.forward({"x": X}, None))  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    from fulgurite_export import export_onnx

    (tmp_path / "model.onnx").touch()
    with pytest.raises(ConfigurationError, match="exists"):
        export_onnx(Perceptron(key=jax.random.key(0)), tmp_path / "model.onnx", {"x": X})


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from fulgurite_export import export_onnx

    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(ConfigurationError, match="install the extra `onnx`"):
        export_onnx(Perceptron(key=jax.random.key(0)), tmp_path / "model.onnx", {"x": X})
