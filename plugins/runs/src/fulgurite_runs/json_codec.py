"""JSON of results and back: arrays, NaN and infinities included."""

import base64
import json
import math
import re
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import is_real_dtype

MAX_SIZE = 64 * 2**20
"""The most bytes of one piece of JSON that is read. Whoever writes one checks it, by
`encode_readable`: nothing can be written that cannot be read."""
MAX_MEMORY = 2**28
"""The most bytes of memory for the values in one piece of JSON, as `estimate_memory` counts."""
_MAX_GROWTH = 32
"""No JSON takes more than this many times its size as Python values; `{"":0},` takes 27 times."""
# What NumPy calls real numbers. It would evaluate other strings as Python, or make types of any
# size.
_DTYPE = re.compile(r"[<>]?(?:bool|b?float|u?int|[iuf][0-9])[a-z0-9_]*")


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """Return `value` as JSON on one line.

    Scalars of NumPy and jax become Python numbers, and tuples become lists. Arrays are
    `{"$array": [...], "dtype": ..., "shape": ...}`, and non-finite floats `{"$float": "nan"}`:
    not the string "NaN", because then a string of that name would come back as a number. Bytes are
    `{"$bytes": ...}` in base64.

    Args:
        value: None, booleans, numbers, strings, bytes and real arrays, in dictionaries, lists and
            tuples.
        sort_keys: whether the keys of dictionaries are sorted.

    Raises:
        ConfigurationError: `value` holds something else, is nested too deeply, or holds an integer
            of thousands of digits.
    """
    options: Any = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    try:
        text = json.dumps(_encode(value), sort_keys=sort_keys, **options)
    except RecursionError as error:
        raise ConfigurationError("what is nested too deeply cannot be written as JSON") from error
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"a number cannot be written as JSON: {error}") from error
    if text.isascii():
        return text
    # A lone surrogate, as in a file name of another encoding, can only be written as its escape.
    return text.encode(errors="backslashreplace").decode()


def loads(text: str | bytes) -> Any:
    """Return the value that `dumps` wrote as `text`. Imports and calls nothing.

    Raises:
        ValueError: it did not write that, or the value would take too much memory.
    """
    check_memory(text)
    try:
        return json.loads(text, object_hook=_decode_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"it is not UTF-8: byte {error.start} is {byte:#04x}") from error


def encode_readable(content: Any, name: str) -> str:
    """Return the JSON of a value that `loads` can read again.

    Args:
        content: as for `dumps`.
        name: what the value is, for errors.

    Raises:
        ConfigurationError: it cannot be written, or not be read again.
    """
    text = dumps(content)
    check_readable(text, name)
    return text


def check_readable(text: str, name: str) -> None:
    """Raise `ConfigurationError` for JSON that is too large to be read again; it says which part is
    the largest.

    Args:
        text: the JSON.
        name: what it is.
    """
    try:
        check_size(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")))
        check_memory(text)
    except ValueError as error:
        largest = _find_largest(json.loads(text))
        place = f", most of it in {'.'.join(largest)}" if largest else ""
        raise ConfigurationError(
            f"{name} is too large to be read again{place}: {error}. Keep less there"
        ) from error


def check_size(num_bytes: int) -> None:
    """Raise `ValueError` if a piece of JSON has more than `MAX_SIZE` bytes."""
    if num_bytes > MAX_SIZE:
        raise ValueError(f"it has {num_bytes:,} bytes; the most is {MAX_SIZE:,}")


def _find_largest(content: Any) -> list[str]:
    """Return the names that lead to the value that makes up more than half of the JSON of an
    object; an empty list if there is none."""
    names = []
    while isinstance(content, dict):
        sizes = {name: len(json.dumps(value)) for name, value in content.items()}
        name = max(sizes, key=sizes.__getitem__, default="")
        if not sizes or name.startswith("$") or 2 * sizes[name] < sum(sizes.values()):
            break
        names.append(name)
        content = content[name]
    return names


def check_memory(text: str | bytes) -> None:
    """Raise `ValueError` if the values in JSON would take more than `MAX_MEMORY`.

    Its size says little: 64 MiB of `{},{},` took 1.5 GB.
    """
    if len(text) * _MAX_GROWTH <= MAX_MEMORY:
        return  # whatever it holds
    size = estimate_memory(text)
    if size > MAX_MEMORY:
        raise ValueError(
            f"it has so many values that they would take {size:,} bytes of memory; the most is "
            f"{MAX_MEMORY:,}"
        )


def estimate_memory(text: str | bytes) -> int:
    """Return how many bytes the values in JSON take as Python objects, or more: what is punctuation
    within strings counts as well.

    An object takes up to 184 bytes, a list 100, an item 8 for its place and up to 32 for a number,
    a string 56.
    """
    raw = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    return (
        184 * raw.count(b"{") + 100 * raw.count(b"[") + 40 * raw.count(b",") + 28 * raw.count(b'"')
    )


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, np.ndarray | np.generic | jax.Array) and is_real_dtype(value.dtype):
        return _encode_array(np.asarray(value))
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        _check_keys(value)
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    raise ConfigurationError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _encode_array(array: np.ndarray) -> Any:
    numbers = array
    # Python has no numbers of bfloat16 and its like, nor of long doubles.
    if array.dtype.kind == "V":
        numbers = array.astype(np.float32)
    elif array.dtype == np.longdouble:
        numbers = array.astype(np.float64)
    if array.ndim == 0:
        return _encode(numbers.item())
    items = [_encode(item) for item in numbers.ravel().tolist()]
    return {"$array": items, "dtype": str(array.dtype), "shape": array.shape}


def _check_keys(pairs: dict[Any, Any]) -> None:
    for key in pairs:
        if not isinstance(key, str) or key.startswith("$"):
            raise ConfigurationError(
                f"{key!r} cannot be a key in JSON: keys are strings that do not begin with '$'"
            )


def _decode_object(pairs: dict[str, Any]) -> Any:
    try:
        if "$float" in pairs:
            return float(pairs["$float"])
        if "$bytes" in pairs:
            return base64.b64decode(pairs["$bytes"], validate=True)
        if "$array" in pairs:
            return _decode_array(pairs)
    except (TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"no such value is written here: {error}") from error
    for key in pairs:
        if key.startswith("$"):
            raise ValueError(f"{key!r:.100} is not a key that is written here")
    return pairs


def _decode_array(pairs: dict[str, Any]) -> np.ndarray:
    """Return an array of numbers, no larger than its text.

    A dtype of strings or records would let a few bytes of JSON ask for any amount of memory.
    """
    items = pairs["$array"]
    name = pairs["dtype"]
    is_name = isinstance(name, str) and _DTYPE.fullmatch(name) is not None
    if not isinstance(items, list) or not is_name or not is_real_dtype(np.dtype(name)):
        raise ValueError(f"an array of dtype {name!r:.100}: it must be one of numbers")
    if not all(isinstance(item, bool | int | float) for item in items):
        raise ValueError("an array holds something else than numbers")
    with np.errstate(over="raise"):
        return np.asarray(items, dtype=np.dtype(name)).reshape(pairs["shape"])


def as_float(value: float) -> float:
    """Return a number of JSON as a float; integers there may be larger than any."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
