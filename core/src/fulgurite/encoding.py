"""Results as valid JSON, and back: arrays, NaN and infinities included."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite.errors import ConfigurationError


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """JSON on one line. Non-finite floats are `{"$float": "nan"}`, arrays `{"$array": [...],
    "dtype": ..., "shape": ...}`; scalars of NumPy and jax become Python numbers, tuples lists."""
    options: Any = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    text = json.dumps(_encoded(value), sort_keys=sort_keys, **options)
    # A lone surrogate, as in a file name of another encoding, cannot be written but by its escape.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def loads(text: str | bytes) -> Any:
    """What `dumps` wrote. Nothing is imported or called."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, np.ndarray | np.generic | jax.Array) and is_real(value.dtype):
        array = np.asarray(value)
        # Of bfloat16 and its like, and of long doubles, Python knows no numbers.
        single, long = array.dtype.kind == "V", array.dtype == np.longdouble
        plain = array.astype(np.float32 if single else np.float64) if single or long else array
        if array.ndim == 0:
            return _encoded(plain.item())
        items = [_encoded(item) for item in plain.ravel().tolist()]
        return {"$array": items, "dtype": str(array.dtype), "shape": array.shape}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        if bad := [key for key in value if not isinstance(key, str) or key.startswith("$")]:
            raise ConfigurationError(
                f"{bad[0]!r} cannot be a key in JSON: keys are strings that do not begin with '$'"
            )
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    raise ConfigurationError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _decoded(pairs: dict[str, Any]) -> Any:
    if "$float" in pairs:
        return float(pairs["$float"])
    if "$array" in pairs:
        return np.asarray(pairs["$array"], dtype=np.dtype(pairs["dtype"])).reshape(pairs["shape"])
    return pairs


def is_real(dtype: Any) -> bool:
    """Whether it is a dtype of booleans or of numbers that are not complex."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating))
