"""What an exported function expects of its inputs, said in one sentence."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite_export import ExportedModel, ExportError, Function, InputError, export, load
from fulgurite_export.sizes import compute_size, find_impossible, is_satisfied


class Sum(fg.Module):
    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        pixels, (lengths,) = batch["pixels"], batch["more"]
        return pixels.sum((1, 2)) + lengths


PIXELS = np.ones((8, 6, 2), np.float32)
LENGTHS = np.arange(8, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(
        Sum(),
        folder,
        {"pixels": PIXELS, "more": (LENGTHS, LENGTHS)} | {"more": (LENGTHS,), "label": LENGTHS},
        shapes={"pixels": "batch, 2*half, 2", "more[0]": "batch", "label": "half"},
        constraints=["mod(batch, 8) == 0", "half <= 4"],
    )
    return load(folder)


def test_inputs_within_the_constraints_are_taken(model: ExportedModel) -> None:
    for half in (1, 3, 4):
        pixels = np.ones((16, 2 * half, 2), np.float32)
        lengths = np.arange(16, dtype=np.int32)
        batch = {"pixels": pixels, "more": (lengths,), "label": np.zeros(half, np.int32)}
        np.testing.assert_array_equal(model(batch), 4 * half + np.arange(16))
        # Lists of numbers are arrays where one is expected.
        batch["more"] = (jnp.arange(16),)
        np.testing.assert_array_equal(model(batch), 4 * half + np.arange(16))


LABEL = np.zeros(3, np.int32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"more": (LENGTHS,), "label": LABEL}, "predict: the input 'pixels' is missing; it must be float32 (batch, 2*half, 2)"),
        ({"pixels": PIXELS[0]}, "predict: the input 'pixels' is float32 (6, 2); it must be float32 (batch, 2*half, 2)"),
        ({"pixels": PIXELS[..., :1]}, "predict: the input 'pixels' is float32 (8, 6, 1); it must be float32 (batch, 2*half, 2)"),
        ({"pixels": PIXELS.astype(np.float64)}, "predict: the input 'pixels' is float64 (8, 6, 2); it must be float32 (batch, 2*half, 2)"),
        ({"pixels": PIXELS[:, :5]}, "predict: the input 'pixels' is float32 (8, 5, 2); it must be float32 (batch, 2*half, 2), where half = 3, batch = 8 by the other inputs"),
        ({"more": (LENGTHS[:7],)}, "predict: the input 'pixels' is float32 (8, 6, 2); it must be float32 (batch, 2*half, 2), where half = 3, batch = 7 by the other inputs"),
        ({"more": (LENGTHS, LENGTHS)}, "predict: the input 'more' has 2 items; it must be a tuple of 1"),
        ({"more": ()}, "predict: the input 'more[0]' is missing; it must be int32 (batch,)"),
        ({"more": LENGTHS}, "predict: the input 'more' is ndarray; it must be a tuple of 1"),
        ({"more": (None,)}, "predict: the input 'more[0]' is NoneType; it must be int32 (batch,)"),
        ({"more": ([[1], [1, 2]],)}, "predict: the input 'more[0]' is not an array; it must be int32 (batch,)"),
        ({"pixel": PIXELS}, "predict: the input has 'pixel', which is not expected: give 'label', 'more', 'pixels'"),
        ({"pixels": PIXELS[:7], "more": (LENGTHS[:7],)}, "predict: half = 3, batch = 7, and it must be that mod(batch, 8) == 0"),
        ({"pixels": np.ones((8, 10, 2), np.float32), "label": np.zeros(5, np.int32)}, "predict: half = 5, batch = 8, and it must be that half <= 4"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_an_error_that_says_what_is_expected(
    model: ExportedModel, batch: dict[str, Any], message: str
) -> None:
    whole = {"pixels": PIXELS, "more": (LENGTHS,), "label": LABEL}
    missing = {"pixels"} if "pixels" not in batch and "label" in batch else set()
    with pytest.raises(InputError) as raised:
        model({key: value for key, value in (whole | batch).items() if key not in missing})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_an_input_of_another_structure_is_an_error(model: ExportedModel) -> None:
    with pytest.raises(InputError, match="the input is ndarray; it must be a dictionary with"):
        model(PIXELS)


def test_a_seed_of_numpy_is_a_seed(tmp_path: Path) -> None:
    def draw(module: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch + jax.random.normal(ctx.key(), (batch.shape[0],))

    inputs = np.zeros(2, np.float32)
    size: Any = np.int64(2)
    export(Sum(), tmp_path / "model", inputs, functions=[Function("draw", draw)], batch=size)
    model = load(tmp_path / "model")
    expected = model(inputs, seed=7)
    for seed in (np.int64(7), np.uint32(7), np.int8(7)):
        np.testing.assert_array_equal(model(inputs, seed=seed), expected)  # type: ignore[arg-type]
    for seed in (np.bool_(True), True, 7.0, np.int8(-1)):
        with pytest.raises(InputError, match="needs a whole number below"):
            model(inputs, seed=seed)  # type: ignore[arg-type]


def test_names_in_a_folder_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    name = "x\n\x1b[31mred"
    copy = Function("copy", lambda module, batch: {name: batch[name]})
    export(Sum(), tmp_path / "model", {name: LENGTHS}, functions=[copy])
    model = load(tmp_path / "model")
    assert str(model).splitlines() == [
        "copy:",
        r"  'x\n\x1b[31mred': int32 (batch,)",
        r"  -> 'x\n\x1b[31mred': int32 (batch,)",
    ]
    with pytest.raises(InputError) as raised:
        model({})
    assert str(raised.value).isprintable()


def test_constraints_that_no_size_satisfies_are_told_from_others() -> None:
    impossible = [
        ["b <= 4", "b >= 8"],
        ["b <= 0"],
        ["3 >= b", "mod(b, 4) == 0"],
        ["mod(b, 2) == 0", "mod(b, 4) == 1"],
        ["mod(b, 4) >= 4"],
        ["a >= 1", "b <= 10", "b*b == 50"],
    ]
    for constraints in impossible:
        assert find_impossible(constraints) == "b"
    possible = [
        ["b >= 100000", "b <= 100000", "mod(b, 32) == 0"],
        ["mod(b, 3) == 1", "mod(b, 5) == 2"],
        ["floordiv(b, 1000) >= 5000", "mod(b, 7) == 3"],
        ["a >= 5", "b <= 4", "a <= b"],  # of two sizes, which nobody solves here
        [],
    ]
    for constraints in possible:
        assert find_impossible(constraints) is None


def test_a_seed_is_needed_by_what_draws_random_numbers_alone(model: ExportedModel) -> None:
    with pytest.raises(InputError, match="predict draws no random numbers: leave out seed"):
        model({"pixels": PIXELS, "more": (LENGTHS,), "label": LABEL}, seed=1)


def test_the_model_says_what_it_takes_and_returns(model: ExportedModel) -> None:
    assert str(model).splitlines() == [
        "predict:",
        "  label: int32 (half,)",
        "  more[0]: int32 (batch,)",
        "  pixels: float32 (batch, 2*half, 2)",
        "  mod(batch, 8) == 0",
        "  half <= 4",
        "  -> output: float32 (batch,)",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2*b + 1", 11),
        ("2*b^2", 50),
        ("b^2 - -1", 26),
        ("floordiv(b, 2) + mod(b, 2)", 3),
        ("max(b, 7)*min(b, 3)", 21),
    ],
)
def test_sizes_are_computed_from_expressions(text: str, size: int) -> None:
    assert compute_size(text, {"b": 5}) == size


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "b.real",
        "b if b else 1",
        "2^9",
        "9223372036854775807^8^8",
        "mod(b, 0)",
        "mod(b)",
        "max(*[b, b])",
        "c",
        "1.5",
        "(" * 150 + "b" + ")" * 150,
        "-" * 199 + "b",
        "b" * 201,
        "lambda: b",
        "'a'*9999999",
        "",
        "b\n",
    ],
)
def test_nothing_else_is_an_expression(text: str) -> None:
    for compute in (compute_size, is_satisfied):
        with pytest.raises(ExportError):
            compute(text, {"b": 5})


def test_chained_and_unknown_comparisons_are_no_constraints() -> None:
    for text in ("1 <= b <= 5", "b != 5", "b > 1", "b in 5", "b"):
        with pytest.raises(ExportError):
            is_satisfied(text, {"b": 5})
    assert is_satisfied("b <= 5", {"b": 5}) and not is_satisfied("mod(b, 2) == 0", {"b": 5})
