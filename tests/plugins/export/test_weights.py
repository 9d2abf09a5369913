"""Weights are stored bit for bit, whatever their memory looks like."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from fulgurite_export import export, load
from fulgurite_export.dtypes import as_stored
from fulgurite_export.weights import write_weights
from safetensors.numpy import load_file

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "array",
    [MATRIX.T, MATRIX[:, ::2], np.asfortranarray(MATRIX), MATRIX[::-1], MATRIX[1], MATRIX[0, 1]],
    ids=["transposed", "strided", "fortran", "reversed", "row", "scalar"],
)
def test_an_array_is_written_by_its_values_and_not_by_its_memory(
    array: np.ndarray, tmp_path: Path
) -> None:
    write_weights(tmp_path, {"array": array})
    stored = load_file(tmp_path / "weights.safetensors")["array"]
    assert stored.shape == np.shape(array)
    np.testing.assert_array_equal(stored, array)


class Holder(fg.Module):
    arrays: dict[str, Any]

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        # Reads every array, whatever its dtype.
        parts = [
            jnp.real(array) if jnp.iscomplexobj(array) else array.astype(jnp.float32)
            for array in self.arrays.values()
        ]
        return batch + sum(part.sum() for part in parts)


DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4"),
)


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3)
    arrays = {name: jnp.asarray(values, name) for name in DTYPES}
    arrays |= {"scalar": jnp.float32(2.5), "empty": jnp.zeros((0, 3), jnp.bfloat16)}
    arrays["turned"] = jnp.asarray(MATRIX).T
    export(Holder(arrays), tmp_path / "model", np.zeros((1,), np.float32), platforms=["cpu"])
    weights = load(tmp_path / "model").weights
    assert weights.keys() == {f"arrays.{name}" for name in arrays}
    for name, array in arrays.items():
        loaded = weights[f"arrays.{name}"]
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert np.asarray(loaded).tobytes() == np.asarray(array).tobytes()


def test_other_programs_read_the_weights_by_the_library(tmp_path: Path) -> None:
    weight = jnp.asarray(MATRIX)
    export(Holder({"weight": weight}), tmp_path / "model", np.zeros((1,), np.float32))
    with safetensors.safe_open(tmp_path / "model" / "weights.safetensors", "np") as file:
        assert [*file.keys()] == ["arrays.weight"]
        np.testing.assert_array_equal(file.get_tensor("arrays.weight"), MATRIX)


def test_a_dtype_without_a_name_in_safetensors_is_stored_as_bytes() -> None:
    array = np.asarray([[1 + 2j, 3]], np.complex128)
    stored = as_stored(array)
    assert (stored.dtype, stored.shape) == (np.uint8, (1, 2, 16))
    np.testing.assert_array_equal(stored.reshape(-1).view(np.complex128).reshape(1, 2), array)
    assert as_stored(np.zeros((), ml_dtypes.int4)).shape == (1,)
    assert as_stored(np.zeros((0, 2), np.complex128)).shape == (0, 2, 16)


def test_models_of_64_bits_need_x64_where_they_are_loaded(tmp_path: Path) -> None:
    from fulgurite_export import ExportError

    with jax.enable_x64(True):
        weight = jnp.asarray(MATRIX, jnp.float64) / 3
        model = Holder({"weight": weight})
        export(model, tmp_path / "model", np.zeros((1,), np.float64))
        loaded = load(tmp_path / "model")
        assert loaded.weights["arrays.weight"].dtype == np.float64
        total = (MATRIX.astype(np.float64) / 3).astype(np.float32).sum()
        np.testing.assert_allclose(loaded(np.ones((1,))), [1 + total], rtol=1e-6)
    with pytest.raises(ExportError, match="JAX_ENABLE_X64=1"):
        load(tmp_path / "model")
