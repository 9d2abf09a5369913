"""Examples in JSON become arrays, and several are computed together."""

import json
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fulgurite_export import (
    ExportedFunction,
    ExportError,
    Function,
    InputError,
    call_together,
    export,
    load,
    parse_example,
)


class Mixed(fg.Module):
    """Takes arrays of several dtypes in structures, of which it does not read one."""

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        low, (number, flags) = batch["low"], batch["more"]
        total = jnp.where(flags, low.astype(jnp.float32), 0.0).sum(1)
        return {"total": total + number, "mean": low.mean(1)}


def make_batch(size: int) -> dict[str, Any]:
    return {
        "low": np.zeros((size, 3), ml_dtypes.bfloat16),
        "more": (np.zeros(size, np.int8), np.zeros((size, 3), bool)),
        "label": np.zeros(size, np.int32),
    }


def sum_whole(module: Any, batch: Any) -> Any:
    return batch["low"].sum()


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportedFunction]:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(
        Mixed(),
        folder,
        make_batch(1),
        functions=["predict", Function("total", sum_whole)],
        shapes={"low": "batch, length", "more[1]": "batch, length"},
        platforms=["cpu"],
    )
    return dict(load(folder).functions)


@pytest.fixture
def predict(functions: dict[str, ExportedFunction]) -> ExportedFunction:
    return functions["predict"]


def test_an_example_in_json_is_a_batch_of_one_in_the_dtypes_of_the_function(
    predict: ExportedFunction,
) -> None:
    text = '{"low": [0.1, 1, -2e3], "more": [-128, [true, false, true]], "label": 3}'
    example = parse_example(predict, text)
    number, flags = example["more"]
    low = example["low"]
    assert (low.dtype, number.dtype, flags.dtype) == (ml_dtypes.bfloat16, np.int8, bool)
    # The nearest of 8 bits, by hand: 0.1 = 1.6 / 16, and 1.6 is between 1.59375 and 1.6015625.
    np.testing.assert_array_equal(low.astype(np.float64), [[1.6015625 / 16, 1, -2000]])
    np.testing.assert_array_equal(number, [-128])
    np.testing.assert_array_equal(flags, [[True, False, True]])
    total = predict(example)["total"]
    np.testing.assert_array_equal(total, [np.float32(1.6015625 / 16) - 2000 - 128])


GOOD = {"low": [1, 2], "more": [0, [True, False]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "predict: the request is not JSON: Expecting value"),
        ("[" * 100_000, "predict: the request is not JSON: maximum recursion depth"),
        ('{"low": [NaN]}', "predict: the request is not JSON: NaN is not a number of JSON"),
        ('{"low": [-Infinity]}', "predict: the request is not JSON: -Infinity is not a number"),
        ('{"low": [1], "low": [2]}', "predict: the request is not JSON: an object has a key twice"),
        ('{"low": [' + "9" * 5000 + "]}", "predict: the request is not JSON: Exceeds the limit"),
        (b"\xff", "predict: the request is not JSON: 'utf-8' codec"),
        ("3", "predict: the input is int; it must be a dictionary with 'low', 'more'"),
        ({"other": 1}, "predict: the input has 'other', which is not expected"),
        ({"more": [0]}, "predict: the input 'more[1]' is missing; it must be bool (batch, length)"),
        ({"low": [[1, 2]]}, "predict: the input 'low' is bfloat16 (1, 1, 2); it must be bfloat16 (batch, length)"),
        ({"low": [1, 2, 3]}, "predict: the input 'more[1]' is bool (1, 2); it must be bool (batch, length), where"),
        ({"low": [[1], [1, 2]]}, "predict: the input 'low' has lists of unequal lengths"),
        ({"low": [1, [2]]}, "predict: the input 'low' has lists of unequal lengths"),
        ({"low": ["1", 2]}, "predict: the input 'low' must be numbers of type bfloat16"),
        ({"low": [True, 2]}, "predict: the input 'low' must be numbers of type bfloat16"),
        ({"low": None}, "predict: the input 'low' must be numbers of type bfloat16"),
        ({"low": {}}, "predict: the input 'low' must be numbers of type bfloat16"),
        ({"low": [1e39, 2]}, "predict: the input 'low' has a number that is too large for bfloat16"),
        ({"low": [10**400, 2]}, "predict: the input 'low' has a number that is too large for bfloat16"),
        ({"more": [128, [True, False]]}, "predict: the input 'more[0]' has a number that is too large for int8"),
        ({"more": [1.0, [True, False]]}, "predict: the input 'more[0]' must be numbers of type int8"),
        ({"more": [1, [0, 1]]}, "predict: the input 'more[1]' must be numbers of type bool"),
    ],
)  # fmt: skip
def test_what_is_not_an_example_is_an_error_of_one_sentence(
    predict: ExportedFunction, text: Any, message: str
) -> None:
    data = json.dumps(GOOD | text) if isinstance(text, dict) else text
    with pytest.raises(InputError) as raised:
        parse_example(predict, data)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_examples_of_several_shapes_are_computed_together_each_with_its_own_output(
    predict: ExportedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    call = ExportedFunction.__call__

    def count(self: ExportedFunction, inputs: Any) -> Any:
        sizes.append(len(inputs["low"]))
        return call(self, inputs)

    monkeypatch.setattr(ExportedFunction, "__call__", count)
    rows = [[1, 2], [3], [5, 6], [7, 8], [9]]
    examples = [
        parse_example(predict, json.dumps({"low": row, "more": [index, [True] * len(row)]}))
        for index, row in enumerate(rows)
    ]
    outputs = call_together(predict, examples)
    # Three of one shape are four, and two of the other.
    assert sizes == [4, 2]
    assert [float(output["total"]) for output in outputs] == [3, 4, 13, 18, 13]
    assert [float(output["mean"]) for output in outputs] == [1.5, 3, 5.5, 7.5, 9]
    assert all(output["mean"].dtype == ml_dtypes.bfloat16 for output in outputs)
    assert call_together(predict, []) == []


class Doubled(fg.Module):
    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return 2 * batch["x"]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch": 1}, [1] * 5),
        ({"batch": 3}, [3, 3]),
        ({"batch": 8}, [8]),
        ({"constraints": ["mod(batch, 6) == 0"]}, [6]),
        ({"constraints": ["batch <= 2"]}, [2, 2, 1]),
        ({"constraints": ["batch <= 6"]}, [5]),
        ({"constraints": ["batch >= 20"]}, [32]),
        ({"constraints": ["batch*length <= 6"]}, [3, 2]),
    ],
)
def test_examples_are_computed_in_batches_of_a_size_that_the_function_takes(
    options: dict[str, Any],
    sizes: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"shapes": {"x": "batch, length"}, **options} if "constraints" in options else options
    export(Doubled(), tmp_path / "model", {"x": np.zeros((1, 2), np.float32)}, **options)
    function = load(tmp_path / "model").functions["predict"]
    examples = [parse_example(function, json.dumps({"x": [n, 0]})) for n in range(5)]
    batch_sizes: list[int] = []
    call = ExportedFunction.__call__

    def count(self: ExportedFunction, inputs: Any) -> Any:
        batch_sizes.append(len(inputs["x"]))
        return call(self, inputs)

    monkeypatch.setattr(ExportedFunction, "__call__", count)
    outputs = call_together(function, examples)
    assert [output.tolist() for output in outputs] == [[2 * n, 0] for n in range(5)]
    assert batch_sizes == sizes
    with pytest.raises(InputError, match="the input 'x'"):
        parse_example(function, '{"x": [[1, 2]]}')


def test_an_example_that_no_batch_could_compute_is_refused_before_others_wait_for_it(
    functions: dict[str, ExportedFunction], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="length = 0, and the output 'mean' is not empty"):
        parse_example(functions["predict"], '{"low": [], "more": [0, []]}')
    shapes = {"x": "batch, length", "y": "batch, length - 3"}
    x = np.zeros((2, 4), np.float32)
    add = Function("add", lambda module, batch: batch["x"].sum(1) + batch["y"].sum(1))
    export(Doubled(), tmp_path / "model", {"x": x, "y": x}, functions=[add], shapes=shapes)
    function = load(tmp_path / "model").functions["add"]
    with pytest.raises(InputError, match="length = 2, and 'length - 3' would be -1"):
        parse_example(function, '{"x": [1, 2], "y": [1]}')


def test_a_function_that_takes_no_batches_of_examples_is_refused_without_one(
    tmp_path: Path,
) -> None:
    def draw(module: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch["x"] + jax.random.normal(ctx.key(), (batch["x"].shape[0],))

    def scale(module: Any, batch: Any) -> Any:
        return batch["x"] * batch["scale"]

    inputs = {"x": np.zeros(1, np.float32), "scale": np.float32(1)}
    functions = [Function("draw", draw), Function("scale", scale)]
    export(Doubled(), tmp_path / "model", inputs, functions=functions)
    loaded = load(tmp_path / "model").functions
    with pytest.raises(ExportError, match="draw draws random numbers, for which no example"):
        call_together(loaded["draw"], [])
    with pytest.raises(ExportError, match="scale has arrays that do not begin with the axis"):
        call_together(loaded["scale"], [])
    with pytest.raises(ExportError, match="scale has arrays that do not begin") as raised:
        parse_example(loaded["scale"], '{"x": 1, "scale": 2}')
    assert not isinstance(raised.value, InputError)  # it is not the example that is wrong


def test_outputs_that_are_not_of_single_examples_are_refused(
    functions: dict[str, ExportedFunction],
) -> None:
    total = functions["total"]
    with pytest.raises(ExportError, match="total has arrays that do not begin with the axis"):
        call_together(total, [parse_example(total, '{"low": [1, 2]}')])
