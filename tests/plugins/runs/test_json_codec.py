"""Results as strict JSON and back."""

import json
import math
import tracemalloc
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_runs.json_codec import MAX_MEMORY, dumps, estimate_memory, loads
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = "bool int8 int32 int64 uint8 uint64 float16 float32 float64 >f4 <i2".split()
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3)
    )
)
KEYS = st.text().filter(lambda key: not key.startswith("$"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS | ARRAYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
)


def strict(text: str) -> Any:
    """JSON by the letter: NaN and Infinity, which Python would take, are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and value; NaN equals NaN, and minus zero does not equal zero."""
    if isinstance(a, np.ndarray):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and all(map(same, a.flat, b.flat))
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | np.floating):
        return type(a) is type(b) and ((math.isnan(a) and math.isnan(b)) or repr(a) == repr(b))
    return type(a) is type(b) and bool(a == b)


@given(VALUES)
def test_json_round_trip_is_exact(value: Any):
    assert same(loads(dumps(value)), value)


@given(VALUES)
def test_output_is_strict_json_on_one_line(value: Any):
    text = dumps(value)
    strict(text)
    assert "\n" not in text
    assert dumps(value) == dumps(loads(text)) == text
    assert same(loads(text.encode()), value)


@pytest.mark.full
@given(
    hnp.arrays(
        hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biuf" and dtype.itemsize <= 8), ()
    )
)
def test_scalars_of_numpy_are_numbers(array: np.ndarray):
    expected = array.item()
    assert same(loads(dumps(array)), expected)
    assert same(loads(dumps(array[()])), expected)


def test_json_text_is_stable():
    assert dumps({"loss": 0.5, "n": 3, "ok": True, "none": None, "text": "é\n"}) == (
        '{"loss":0.5,"n":3,"ok":true,"none":null,"text":"é\\n"}'
    )
    assert (
        dumps([math.nan, math.inf, -math.inf])
        == '[{"$float":"nan"},{"$float":"inf"},{"$float":"-inf"}]'
    )
    assert dumps(np.array([[1, 2]], np.int8)) == '{"$array":[1,2],"dtype":"int8","shape":[1,2]}'
    assert (
        dumps(np.array([1, np.nan], np.float32))
        == '{"$array":[1.0,{"$float":"nan"}],"dtype":"float32","shape":[2]}'
    )


def test_bytes_come_back_as_bytes():
    value = {"state": b"\x00\xff\n", "empty": b""}
    text = dumps(value)
    assert loads(text) == value
    assert json.loads(text)["state"] == {"$bytes": "AP8K"}


def test_tuples_become_lists():
    assert loads(dumps({"shape": (2, (3,))})) == {"shape": [2, [3]]}


def test_arrays_of_jax_come_back_as_arrays_of_numpy():
    value = {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(4), "loss": jnp.float32(np.nan)}
    back = loads(dumps(value))
    assert same(back["w"], np.arange(6, dtype=np.float32).reshape(2, 3))
    assert same(back["n"], 4)
    assert same(back["loss"], math.nan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_the_small_dtypes_of_jax_keep_their_values_and_dtype(dtype: str):
    array = jnp.array([1, -2, 3], dtype)
    back = loads(dumps(array))
    assert back.dtype == array.dtype
    assert back.astype(float).tolist() == [1.0, -2.0, 3.0]


def test_long_doubles_are_written_as_doubles():
    third = np.longdouble(1) / 3
    assert loads(dumps({"x": third})) == {"x": float(third)}
    assert loads(dumps(np.full(2, third))).tolist() == [float(third)] * 2


def test_lone_surrogates_are_valid_json():
    value = {"name\udcff": ["\udc80 ö", "plain"]}
    written = dumps(value).encode()
    assert strict(written.decode()) == loads(written) == value


def test_a_scalar_of_bfloat16_is_a_number():
    assert same(loads(dumps(jnp.bfloat16(-2))), -2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: "a"}, "1 cannot be a key"),
        ({"$float": "nan"}, "'$float' cannot be a key"),
        ({"a": {"b": {1, 2}}}, "set cannot be written"),
        (bytearray(b"a"), "bytearray cannot be written"),
        (1j, "complex"),
        (np.complex64(1j), "complex"),
        (np.array([1j]), "array"),
        (np.array(["a"]), "array"),
        (np.array([1, None]), "array"),
        (np.array(["2020-01-01"], "datetime64[D]"), "array"),
        (jax.random.key(0), "key<fry>"),
        (jax.random.split(jax.random.key(0), 2), "key<fry>"),
        (object, "type cannot be written"),
    ],
)
def test_unserializable_value_is_an_error_naming_its_path(value: Any, message: str):
    with pytest.raises(ConfigurationError) as caught:
        dumps(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"$array":["x","x"],"dtype":"S1000000000","shape":[2]}',
        '{"$array":["x"],"dtype":"U100000000","shape":[1]}',
        '{"$array":[1],"dtype":"O","shape":[1]}',
        '{"$array":[[1]],"dtype":"int8","shape":[1]}',
        '{"$array":[1],"dtype":"int8","shape":[1000000000000]}',
        '{"$array":3,"dtype":"int8","shape":[]}',
        '{"$array":[1],"dtype":["int8"],"shape":[1]}',
        '{"$array":[1],"dtype":"(9,9)i4","shape":[1]}',
    ],
)
def test_arrays_are_numbers_and_no_larger_than_their_text(text: str) -> None:
    """58 bytes that asked for a string of 10^9 bytes an item took 3 GB."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            loads(text)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_key_that_nobody_writes_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'\$tuple' is not a key that is written here"):
        loads('{"a":[{"$tuple":[1]}]}')


@pytest.mark.parametrize(
    "text",
    [
        '{"$float":[1]}',
        '{"$float":' + "9" * 400 + "}",
        '{"$bytes":1}',
        '{"$array":[1],"shape":[1]}',
        '{"$array":[300],"dtype":"int8","shape":[1]}',
        '{"$array":[1e308],"dtype":"float32","shape":[1]}',
        '{"$array":[1e308],"dtype":"int32","shape":[1]}',
        '{"$array":[1],"dtype":"(1,,2)i4","shape":[1]}',
        '{"$array":[1],"dtype":"a","shape":[1]}',
        '{"$array":[1],"dtype":"\ud800","shape":[1]}',
        '{"$array":[1],"dtype":"int99","shape":[1]}',
        '{"$array":[1],"dtype":"int8","shape":{"a":1}}',
        "[" * 100_000,
    ],
)
def test_what_dumps_never_writes_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


@pytest.mark.full
@pytest.mark.parametrize(
    "item",
    [
        '{"":0}',
        *(
            pytest.param(item, marks=pytest.mark.slow)
            for item in ("{}", "[]", "[0]", "0", "0.1", '"ab"', "null")
        ),
    ],
)
def test_json_of_many_small_values_takes_bounded_memory(item: str) -> None:
    """64 MiB of `{},{},` took 1.5 GB."""
    largest = MAX_MEMORY // estimate_memory(f"{item},")
    text = f"[{','.join([item] * largest)}]"
    with pytest.raises(ValueError, match="so many values that they would take"):
        loads(f"[{','.join([item] * (64 * 2**20 // (len(item) + 1)))}]")
    tracemalloc.start()
    try:
        with suppress(ValueError):
            loads(text)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY + 2 * len(text)
    finally:
        tracemalloc.stop()


def test_large_json_of_few_values_is_read() -> None:
    value = {f"block_{number}/gradient_norm" * 20: 0.1 for number in range(100_000)}
    text = dumps(value)
    assert len(text) > 40 * 2**20
    assert estimate_memory(text) < MAX_MEMORY
    assert loads(text.encode()) == value


def test_every_small_float_is_read_back() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
        dtype = jnp.dtype(name)
        unsigned = np.uint8 if dtype.itemsize == 1 else np.uint16
        bits = np.arange(2 ** (8 * dtype.itemsize), dtype=unsigned)
        array = bits.view(dtype)
        read = loads(dumps(array))
        assert read.dtype == dtype
        with np.errstate(invalid="ignore"):  # signalling NaNs
            assert np.array_equal(read.astype(float), array.astype(float), equal_nan=True)


def test_what_is_nested_too_deeply_is_an_error_when_it_is_written() -> None:
    value: Any = 0
    for _ in range(2000):
        value = [value]
    with pytest.raises(ConfigurationError, match="nested too deeply cannot be written"):
        dumps(value)


def test_bytes_that_are_not_utf_8_are_told_by_their_place() -> None:
    with pytest.raises(ValueError, match="^it is not UTF-8: byte 6 is 0xff$"):
        loads(b'{"a":"\xff"}')
