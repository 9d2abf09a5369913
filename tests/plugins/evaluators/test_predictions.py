"""Predictions in files: `fulgurite predict` (L15), and `PredictionWriter` during training (L24)."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, ModelError
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli.command import main as fulgurite
from fulgurite_evaluators import PredictionWriter
from fulgurite_evaluators.predictions import open_predictions
from fulgurite_runs.json_codec import loads

pytestmark = pytest.mark.full

PROGRAM = """
from types import SimpleNamespace

import fulgurite as fg
import numpy as np
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from test_predictions import Scaled

DATA = np.arange(5, dtype=np.float32)


def experiment(steps: int = 2) -> Experiment:
    batches = fg.ArrayData(DATA, 2, remainder="pad")
    engine = fg.Engine(
        steps=steps,
        plugins=[
            Checkpointer(every=1),
            Evaluator("other", [DATA + 10]),
            Evaluator("probe", fn=lambda state, step: {"x": 1.0}),
        ],
        autoload=False,
    )
    data = SimpleNamespace(train=batches, predict=batches)
    return Experiment(engine, Scaled, lambda: data)
"""


class Scaled(fg.Module):
    """Predicts its weight times the batch; the weight grows by 1 with each update."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(-self.weight)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(-self.weight)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return {"scaled": self.weight * batch, "pair": jnp.stack([batch, -batch], axis=1)}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A program, and a run of it with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("predictions")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    assert fulgurite(["fit", str(program), "--run", str(folder / "run")]) == 0
    return program, folder / "run"


def predict(run: tuple[Path, Path], out: Path, *arguments: str) -> int:
    program, folder = run
    return fulgurite(["predict", str(program), "--run", str(folder), "--out", str(out), *arguments])


def test_predictions_for_every_example_without_padding_L15(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, tmp_path / "preds.npz", "--step", "1") == 0
    assert "predictions for 5 examples" in capsys.readouterr().out
    with np.load(tmp_path / "preds.npz") as arrays:
        assert set(arrays) == {"scaled", "pair"}
        assert arrays["scaled"].tolist() == [0, 1, 2, 3, 4]
        assert arrays["pair"][3].tolist() == [3, -3]
    out = tmp_path / "lines" / "preds.jsonl"
    assert predict(run, out, "--evaluator", "other", "--batches", "1") == 0
    lines = [loads(line) for line in out.read_text().splitlines()]
    assert lines[1] == {"scaled": 22, "pair": [11, -11]} and len(lines) == 5


def test_mistakes_of_the_command_are_errors_L15(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "preds.npz"
    out.write_text("keep me")
    assert predict(run, out) == 2
    assert f"error: {out} exists: give another file, or --force" in capsys.readouterr().err
    assert out.read_text() == "keep me"
    assert predict(run, out, "--force") == 0
    capsys.readouterr()
    assert predict(run, tmp_path / "preds.csv") == 2
    assert "predictions are written as .npz" in capsys.readouterr().err
    assert predict(run, tmp_path / "a.npz", "--evaluator", "othre") == 2
    assert "Did you mean 'other'?" in capsys.readouterr().err
    assert predict(run, tmp_path / "a.npz", "--evaluator", "probe") == 2
    assert "'probe' has no data, but computes its metrics itself" in capsys.readouterr().err
    assert predict(run, tmp_path / "a.npz", "--step", "7") == 1
    assert "there is no checkpoint of step 7" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [out]


def write(path: Path, *batches: Any) -> dict[str, np.ndarray]:
    """Return what NumPy reads of predictions in batches."""
    with open_predictions(path) as append:
        for batch in batches:
            append(batch)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.int4])
def test_numbers_that_numpy_does_not_know_are_written_as_those_that_it_does(
    tmp_path: Path, dtype: Any
) -> None:
    read = write(tmp_path / "preds.npz", jnp.array([1.5, -2]).astype(dtype))["preds"]
    expected = [1, -2] if dtype == jnp.int4 else [1.5, -2]
    assert read.dtype.kind in "if" and read.tolist() == expected


@pytest.mark.parametrize("name", ["file", "allow_pickle", "arr_0"])
def test_predictions_may_be_called_as_an_argument_of_numpy_is(tmp_path: Path, name: str) -> None:
    batch = {name: np.arange(2), "x": np.ones(2)}
    read = write(tmp_path / "preds.npz", batch, batch)
    assert {name: array.tolist() for name, array in read.items()} == {
        name: [0, 1, 0, 1],
        "x": [1, 1, 1, 1],
    }


def test_predictions_that_some_batches_lack_or_have_in_other_shapes_are_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "preds.npz"
    few, many = {"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}
    for batches in ((few, many), (many, few)):
        with pytest.raises(ModelError, match=r"some batches have predictions 'b'.*\.jsonl"):
            write(path, *batches)
    with pytest.raises(ModelError, match=r"'preds' .* shapes \[3\] and \[4\]: pad them"):
        write(path, np.ones((2, 3)), np.ones((2, 4)))
    assert list(tmp_path.iterdir()) == []
    assert write(path) == {}  # without a batch it can be read as well


def test_nothing_is_left_of_a_file_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "preds.jsonl"

    def fail() -> None:
        with open_predictions(path) as append:
            append(np.ones(2))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert list(tmp_path.iterdir()) == []
    with open_predictions(path) as append:
        append(np.array([1.0, np.nan]))
    assert path.read_text() == '{"preds":1.0}\n{"preds":{"$float":"nan"}}\n'


def test_predictions_are_written_during_training_L24(tmp_path: Path) -> None:
    data = fg.ArrayData(np.arange(3, dtype=np.float32), 2, remainder="pad")
    writer = PredictionWriter("test", data, every=2, format="npz")
    engine = fg.Engine(steps=4, run_dir=tmp_path / "run", plugins=[writer], autoload=False)
    engine.fit(Scaled, data)
    folder = tmp_path / "run" / "predictions"
    assert sorted(path.name for path in folder.iterdir()) == ["test-2.npz", "test-4.npz"]
    with np.load(folder / "test-4.npz") as arrays:
        assert arrays["scaled"].tolist() == [0, 4, 8]
    with pytest.raises(ConfigurationError, match="it names files|names files"):
        PredictionWriter("a/b", data)
    with pytest.raises(ConfigurationError, match="'csv'"):
        PredictionWriter("a", data, format="csv")  # type: ignore[arg-type]


def test_checkpoints_of_weights_alone_L16(tmp_path: Path) -> None:
    data = fg.ArrayData(np.arange(3, dtype=np.float32), 3)

    class Momentum(Scaled):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1.0)

    def build(run: Path, **settings: Any) -> fg.Engine:
        checkpointer = Checkpointer(every=2, monitor="train/loss", mode="min", **settings)
        return fg.Engine(steps=4, log_every=2, run_dir=run, plugins=[checkpointer], autoload=False)

    engine = build(tmp_path / "weights", weights_only=True)
    result = engine.fit(Momentum, data)
    build(tmp_path / "all").fit(Momentum, data)
    sizes = {
        name: sum(
            path.stat().st_size
            for path in (tmp_path / name / "checkpoints").rglob("*")
            if path.is_file()
        )
        for name in ("weights", "all")
    }
    assert sizes["weights"] < sizes["all"]
    for step in ("latest", "best", 4):
        preds = engine.predict(Momentum, data, weights=fg.CheckpointRef(tmp_path / "weights", step))
        assert preds["scaled"][1] == result.module.weight
    # A new run may begin from it, with an optimizer of its own.
    later = build(tmp_path / "later").fit(Momentum, data, init_from=tmp_path / "weights", steps=2)
    assert float(later.module.weight) == pytest.approx(float(result.module.weight) + 2, rel=1e-4)
    with pytest.raises(CheckpointError, match="holds weights alone.*init_from"):
        build(tmp_path / "weights").fit(Momentum, data, resume="auto")
