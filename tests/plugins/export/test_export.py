"""What is exported: functions, dtypes, structures and open sizes; and what cannot be."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import Perceptron
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite_export import ExportError, Function, export, load
from fulgurite_precision import Precision

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :3]}


class Many(fg.Module):
    """Takes and returns arrays of several dtypes in structures."""

    weight: Any
    scale: Any
    offset: Any
    turn: Any

    def __init__(self) -> None:
        self.weight = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 4
        self.scale = jnp.float32(0.5)
        self.offset = jnp.zeros((0, 3))
        self.turn = jnp.asarray([1j, 1 + 1j], jnp.complex64)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        image, (numbers, flags) = batch["image"], batch["more"]
        low = image.astype(jnp.bfloat16) @ self.weight
        return {
            "low": low,
            "pair": (numbers * 2, [jnp.where(flags, numbers, -1)]),
            "complex": image * self.turn,
            "scaled": image.sum(1) * self.scale + self.offset.sum(),
        }


def make_many(size: int) -> dict[str, Any]:
    image = np.arange(2 * size, dtype=np.float32).reshape(size, 2) / 8
    numbers = np.arange(size, dtype=np.int16)
    return {"image": image, "more": (numbers, numbers % 2 == 0)}


@pytest.mark.full
def test_dtypes_and_structures_of_inputs_and_outputs_are_kept(tmp_path: Path) -> None:
    module = Many()
    export(module, tmp_path / "model", make_many(2))
    model = load(tmp_path / "model")
    for size in (1, 7, 64):
        batch = make_many(size)
        predictions = fg.Engine(steps=1, autoload=False).predict(module, [batch])
        jax.tree.map(np.testing.assert_array_equal, model(batch), predictions)
    batch = make_many(5)
    outputs = model(batch)
    image, numbers = batch["image"], batch["more"][0]
    assert outputs["low"].dtype == jnp.bfloat16
    # Quarters and eighths of small numbers, which bfloat16 holds.
    weight = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    np.testing.assert_array_equal(np.asarray(outputs["low"], np.float32)[:2], (image @ weight)[:2])
    pair = outputs["pair"]
    assert isinstance(pair, tuple) and isinstance(pair[1], list)
    assert pair[0].dtype == np.int16
    np.testing.assert_array_equal(pair[0], numbers * 2)
    np.testing.assert_array_equal(pair[1][0], [0, -1, 2, -1, 4])
    np.testing.assert_array_equal(
        outputs["complex"], image * np.asarray([1j, 1 + 1j], np.complex64)
    )
    np.testing.assert_array_equal(outputs["scaled"], image.sum(1) / 2)


def test_an_empty_batch_gives_empty_outputs(tmp_path: Path) -> None:
    export(Many(), tmp_path / "model", make_many(2))
    outputs = load(tmp_path / "model")(make_many(0))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), outputs)
    assert shapes == {
        "low": ((0, 3), "bfloat16"),
        "pair": (((0,), "int16"), [((0,), "int16")]),
        "complex": ((0, 2), "complex64"),
        "scaled": ((0,), "float32"),
    }


@pytest.mark.full
def test_several_functions_share_the_weights(tmp_path: Path) -> None:
    module = Perceptron(key=jax.random.key(0))

    def sample(module: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch["start"] + jax.random.normal(ctx.key(), batch["start"].shape)

    start = {"start": np.zeros((2, 5), np.float32)}
    functions = ["predict", "embed", Function("sample", call=sample, inputs=start)]
    export(module, tmp_path / "model", BATCH, functions=functions)
    model = load(tmp_path / "model")
    assert {*model.functions} == {"predict", "embed", "sample"}
    np.testing.assert_allclose(model({"x": X}), jax.vmap(module.net)(jnp.asarray(X)), atol=1e-6)
    first = module.net.layers[0]
    hidden = np.maximum(X @ np.asarray(first.weight).T + np.asarray(first.bias), 0)
    np.testing.assert_allclose(model.functions["embed"]({"x": X}), hidden, atol=1e-6)
    assert model.functions["embed"].spec.weights == (0, 1)
    samples = [model.functions["sample"](start, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(samples[0], samples[1])
    assert np.abs(samples[0] - samples[2]).max() > 0.1


def test_a_function_with_inputs_of_its_own_has_shapes_and_constraints_of_its_own(
    tmp_path: Path,
) -> None:
    class Sum(fg.Module):
        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return batch["x"].sum(1)

    def double(module: Any, batch: Any) -> Any:
        return 2 * batch["y"]

    zeros = np.zeros((1, 3), np.float32)
    double_it = Function("double", double, {"y": zeros}, {"y": "rows, 3"}, ["rows <= 4"])
    quarter = Function("quarter", lambda module, batch: batch["y"] / 4, {"y": zeros})
    export(
        Sum(),
        tmp_path / "model",
        {"x": zeros},
        functions=["predict", double_it, quarter],
        shapes={"x": "batch, length"},
        constraints=["length <= 5"],
        platforms=["cpu"],
    )
    functions = load(tmp_path / "model").functions
    constraints = {name: function.spec.constraints for name, function in functions.items()}
    assert constraints == {"predict": ("length <= 5",), "double": ("rows <= 4",), "quarter": ()}
    np.testing.assert_array_equal(functions["predict"]({"x": X[:2]}), X[:2].sum(1))
    np.testing.assert_array_equal(functions["double"]({"y": X[:3, :3]}), 2 * X[:3, :3])
    np.testing.assert_array_equal(functions["quarter"]({"y": X[:, :3]}), X[:, :3] / 4)


def test_an_error_in_a_function_shows_the_lines_of_the_user_alone(tmp_path: Path) -> None:
    def fail(module: Any, batch: Any) -> Any:
        raise ValueError("by the user")

    module = Perceptron(key=jax.random.key(0))
    with pytest.raises(ValueError, match="by the user") as raised:
        export(module, tmp_path / "model", BATCH, functions=[Function("fail", fail)])
    assert [entry.name for entry in raised.traceback][-1] == "fail"
    packages = {entry.frame.f_globals["__name__"].partition(".")[0] for entry in raised.traceback}
    assert packages.isdisjoint({"fulgurite", "fulgurite_export", "jax", "equinox"})


@pytest.mark.full
def test_a_program_for_several_devices_is_an_error(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "export_divided.py"), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert "ModelError: predict: its program is for 2 devices, because of" in process.stderr
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_could_not_be_loaded_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with a size of which the expression is too long for the loader."""
    monkeypatch.setattr("fulgurite_export.sizes.MAX_TEXT", 10)

    def pool(module: Any, batch: Any) -> Any:
        return batch["x"].reshape(-1) + module.net.layers[0].bias[0]

    module = Perceptron(key=jax.random.key(0))
    with pytest.raises(
        ModelError, match="the folder could not be loaded: '4[*]batch_si' is not the size"
    ):
        shapes = {"x": "batch_size, 4"}
        export(module, tmp_path / "model", {"x": X}, functions=[Function("pool", pool)], shapes=shapes)  # fmt: skip
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_a_seed_gives_the_random_numbers_of_an_engine_of_that_seed(tmp_path: Path) -> None:
    class Noisy(fg.Module):
        base: Perceptron

        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return self.base.forward(batch, ctx) + jax.random.normal(
                ctx.key(), (batch["x"].shape[0], 3)
            )

    engine = fg.Engine(steps=1, seed=5, autoload=False)
    module = Noisy(Perceptron(key=jax.random.key(0)))
    export(module, tmp_path / "model", BATCH)
    predictions = load(tmp_path / "model")({"x": X}, seed=5)
    np.testing.assert_allclose(predictions, engine.predict(module, [BATCH]), atol=1e-6)


def test_what_plugins_of_the_engine_change_is_exported(tmp_path: Path) -> None:
    engine = fg.Engine(steps=1, autoload=False, plugins=[Precision("bf16")])
    module = Perceptron(key=jax.random.key(0))
    export(module, tmp_path / "model", BATCH, engine=engine)
    predictions = load(tmp_path / "model")({"x": X})
    expected = engine.predict(module, [BATCH])
    assert predictions.dtype == expected.dtype
    np.testing.assert_allclose(
        np.asarray(predictions, np.float32), np.asarray(expected, np.float32), atol=1e-6
    )
    assert (
        np.abs(np.asarray(predictions, np.float32) - jax.vmap(module.net)(jnp.asarray(X))).max()
        > 1e-4
    )


def test_an_array_that_nothing_reads_is_left_out(tmp_path: Path) -> None:
    class Spare(Perceptron):
        unused: Any

        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.unused = jnp.ones(1000)

    export(Spare(key=jax.random.key(0)), tmp_path / "model", BATCH)
    model = load(tmp_path / "model")
    assert "unused" not in model.weights and len(model.weights) == 4
    np.testing.assert_array_equal(model({"x": X}), model(BATCH))


def test_the_size_of_an_input_of_which_no_number_is_read_is_known(tmp_path: Path) -> None:
    def count(module: Any, batch: Any) -> Any:
        return jnp.zeros(batch["x"].shape[0]) + module.net.layers[0].bias[0]

    module = Perceptron(key=jax.random.key(0))
    export(module, tmp_path / "model", {"x": X}, functions=[Function("count", count)])
    assert load(tmp_path / "model")({"x": X[:3]}).shape == (3,)


@pytest.mark.full
def test_a_task_with_dropout_takes_any_batch(tmp_path: Path) -> None:
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    model = eqx.nn.Sequential([linear, eqx.nn.Dropout(0.5)])
    task = fg.Task(model, loss=lambda preds, batch: preds.sum(1))
    export(task, tmp_path / "model", (X, X))
    by_hand = X[:5] @ np.asarray(linear.weight).T + np.asarray(linear.bias)
    np.testing.assert_allclose(load(tmp_path / "model")((X[:5],)), by_hand, atol=1e-6)


def test_random_keys_in_a_model_are_exported(tmp_path: Path) -> None:
    class Keyed(fg.Module):
        key: Any

        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return batch + jax.random.normal(self.key, batch.shape[1:])

    key = jax.random.key(3)
    export(Keyed(key), tmp_path / "model", X)
    np.testing.assert_allclose(
        load(tmp_path / "model")(X), X + jax.random.normal(key, (4,)), atol=1e-6
    )


def test_a_check_in_a_layer_is_an_error_that_names_the_layer_and_the_remedy(tmp_path: Path) -> None:
    class Checked(eqx.Module):
        def __call__(self, x: Any) -> Any:
            return eqx.error_if(x, x.sum() < 0, "negative")

    class Net(fg.Module):
        layer: Any

        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return jax.vmap(self.layer)(batch)

    with pytest.raises(
        ModelError, match=r"Checked.__call__ \(.*test_export.py:\d+\).*EQX_ON_ERROR=nan"
    ):
        export(Net(Checked()), tmp_path / "model", X)

    class Printing(eqx.Module):
        def __call__(self, x: Any) -> Any:
            jax.debug.print("x {}", x)
            return x

    with pytest.raises(ModelError, match="Printing.__call__ .*leave it out"):
        export(Net(Printing()), tmp_path / "model", X)
    assert not [*tmp_path.iterdir()]


def test_a_function_that_depends_on_an_open_size_is_an_error_that_says_how_to_fix_it(
    tmp_path: Path,
) -> None:
    def halve(module: Any, batch: Any) -> Any:
        return batch[:3] if batch.shape[0] > 3 else batch

    module = Perceptron(key=jax.random.key(0))
    functions = [Function("halve", halve)]
    with pytest.raises(ModelError, match="halve depends on a size that is open.*constraints="):
        export(module, tmp_path / "model", X, functions=functions)
    export(module, tmp_path / "four", X, functions=functions, constraints=["batch >= 4"])
    assert load(tmp_path / "four")(X[:5]).shape == (3, 4)

    def count(module: Any, batch: Any) -> Any:
        return batch * len(batch)

    with pytest.raises(ModelError, match=r"count makes a number .* write x.shape\[0\]"):
        export(module, tmp_path / "model", X, functions=[Function("count", count)])
    export(module, tmp_path / "two", X, functions=functions, batch=2)
    assert load(tmp_path / "two")(X[:2]).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": "any"}, "batch is 'any'"),
        ({"batch": 0}, "batch is 0"),
        ({"platforms": ["gpu"]}, "platforms is 'gpu'"),
        ({"platforms": []}, "platforms is empty"),
        ({"platforms": "cpu"}, "platforms is a list of strings"),
        ({"constraints": "batch <= 8"}, "constraints is a list of strings"),
        ({"constraints": ["batch < 8"]}, r"constraints=\['batch < 8'\]: .*a constraint has one of"),
        ({"constraints": ["batch <="]}, "'batch <=' is not the size"),
        ({"constraints": ["length <= 8"]}, "about 'length', and its open sizes are batch"),
        ({"constraints": ["batch <= 4", "batch >= 8"]}, "there is no size 'batch' that satisfies"),
        ({"constraints": ["batch == 4"]}, "none: write '4' in its place in shapes= or batch="),
        ({"functions": []}, "a list of names"),
        ({"functions": Function("predict")}, "a list of names"),
        ({"functions": ["../x"]}, "cannot be the name of a function"),
        ({"functions": ["predict", "predict"]}, "two functions have one name"),
        ({"functions": ["missing"]}, "no method 'missing'"),
        ({"shapes": {"z": "batch"}}, "there is no input 'z'"),
        ({"shapes": {"x": "batch"}}, "the shape 'batch' of the input 'x' has 1 axes"),
        ({"shapes": {"x": "batch, ("}}, "the shape 'batch, .' of the input 'x' cannot be read"),
        ({"shapes": {"x": "batch, 2*n"}}, "size 'n' alone"),
        ({"inputs": None}, "no inputs"),
        ({"inputs": {"x": object()}}, "object cannot be exported"),
        ({"inputs": {1: X}}, "names in a dictionary must be strings"),
        ({"inputs": {"x": np.array(["a"])}}, "dtype <U1"),
    ],
)
def test_invalid_arguments_are_errors(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = Perceptron(key=jax.random.key(0))
    with pytest.raises(ConfigurationError, match=message):
        export(module, tmp_path / "model", **{"inputs": {"x": X}, **arguments})
    assert not [*tmp_path.iterdir()]


def test_a_home_and_variables_in_a_path_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    module = Perceptron(key=jax.random.key(0))
    digest = export(module, "~/model", {"x": X}, platforms=["cpu"])
    assert [item.name for item in tmp_path.iterdir()] == ["home"]
    assert load("$HOME/model", digest=digest).digest == load(Path("~/model")).digest
    with pytest.raises(ConfigurationError, match="model exists: remove it"):
        export(module, "$HOME/model", {"x": X})
    for path in ("~no-such-user/model", "$NO_SUCH_VARIABLE/model"):
        with pytest.raises(ConfigurationError, match="there is no such user or variable"):
            export(module, path, {"x": X})
        with pytest.raises(ExportError, match="there is no such user or variable"):
            load(path)


def test_functions_and_platforms_of_generators_are_those_of_lists(tmp_path: Path) -> None:
    export(
        Perceptron(key=jax.random.key(0)),
        tmp_path / "model",
        {"x": X},
        functions=(name for name in ["predict"]),  # type: ignore[arg-type]
        platforms=(name for name in ["cpu"]),  # type: ignore[arg-type]
        constraints=(text for text in ["batch <= 9"]),
    )
    model = load(tmp_path / "model")
    assert model.platforms == ("cpu",) and model.functions["predict"].spec.constraints
    assert len(model({"x": X[:2]})) == 2


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigurationError, match="exists"):
        export(Perceptron(key=jax.random.key(0)), tmp_path / "model", BATCH)


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container each process may have the same one."""
    (tmp_path / f".model.{os.getpid()}.part").mkdir()
    export(Perceptron(key=jax.random.key(0)), tmp_path / "model", {"x": X}, platforms=["cpu"])
    assert load(tmp_path / "model")({"x": X[:2]}).shape[0] == 2


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dict is not a model"):
        export({}, tmp_path / "model", BATCH)
    with pytest.raises(ConfigurationError, match="tuple is not a model"):
        export((Perceptron(key=jax.random.key(0)), None, 1), tmp_path / "model", BATCH)
