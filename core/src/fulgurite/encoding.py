"""Results as valid JSON, and back: arrays, NaN and infinities included."""

import json
import math
from typing import Any

import jax
import numpy as np

from fulgurite.errors import ConfigurationError


def dumps(value: Any) -> str:
    """Compact JSON on one line, the same bytes for equal values. Non-finite floats are `{"$float": "nan"}`, arrays
    `{"$array": [...], "dtype": ..., "shape": ...}`; tuples become lists."""
    return json.dumps(_encoded(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def loads(text: str | bytes) -> Any:
    """What `dumps` wrote. Nothing is imported or called."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | jax.Array) and value.ndim == 0):
        value = np.asarray(value).item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            array = array.astype(np.float32)  # bfloat16 and float8, exactly
        return {"$array": [_encoded(item) for item in array.ravel().tolist()], "dtype": str(array.dtype), "shape": array.shape}
    if isinstance(value, dict):
        if bad := [key for key in value if not isinstance(key, str) or key.startswith("$")]:
            raise ConfigurationError(f"{bad[0]!r} cannot be a key in JSON: keys are strings that do not begin with '$'")
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
