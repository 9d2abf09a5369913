"""Data that is prepared once, and its parts."""

import json
import subprocess
import sys

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError
from fulgurite_data import Arrays, DataModule


class Line(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key):
        self.layer = eqx.nn.Linear(1, 1, key=key)

    def training_step(self, batch, ctx):
        preds = jax.vmap(self.layer)(batch["x"][:, None])
        return fg.Output(jnp.mean((preds[:, 0] - batch["y"]) ** 2), preds=preds)

    def configure_optimizers(self):
        return optax.sgd(0.01)


class Numbers(DataModule):
    def __init__(self, folder):
        self.folder = folder
        self.calls = []

    def prepare(self):
        self.calls.append("prepare")
        np.save(self.folder / "x.npy", np.arange(40, dtype=np.float32) / 40)

    def setup(self):
        self.calls.append("setup")
        x = np.load(self.folder / "x.npy", mmap_mode="r")
        self.examples = Arrays({"x": x, "y": 2 * x})

    def make_train(self):
        return self.examples.take(32).shuffle().batch(8)

    def make_evaluations(self):
        return {"validation": self.examples.skip(32).batch(8)}


def test_parts_are_read_where_they_are_needed_and_prepared_once(tmp_path):
    data = Numbers(tmp_path / "cache")
    assert data.calls == []
    engine = fg.Engine(epochs=2)
    result = engine.fit(Line, data)
    assert result.state.step == 8
    loss = engine.evaluate(result, data, name="validation")["loss"]
    x = np.arange(32, 40, dtype=np.float32) / 40
    weight, bias = result.state.module.layer.weight, result.state.module.layer.bias
    expected = np.mean((x * float(weight[0, 0]) + float(bias[0]) - 2 * x) ** 2)
    assert np.isclose(loss, expected, rtol=1e-5)
    assert data.calls == ["prepare", "setup"]
    with pytest.raises(DataError, match="Numbers has no evaluation 'test'"):
        engine.evaluate(result, data, name="test")
    with pytest.raises(DataError, match="Numbers has no predict"):
        engine.predict(result, data)


def test_part_that_looks_for_a_missing_attribute_says_so_and_not_that_there_is_no_part(tmp_path):
    class Misspelt(Numbers):
        def make_train(self):
            return self.exampels.batch(8)  # type: ignore[attr-defined]

    data = Misspelt(tmp_path / "cache")
    with pytest.raises(DataError, match=r"Misspelt\.make_train failed: .*'exampels'"):
        fg.Engine(steps=1).fit(Line, data)
    assert len(data.evaluations["validation"]) == 1


def test_failure_to_prepare_is_told_and_the_next_start_tries_again(tmp_path):
    class Broken(Numbers):
        def prepare(self):
            self.calls.append("prepare")
            if len(self.calls) == 1:
                raise OSError("the disk is full")
            getattr(self, "missing_attribute")  # noqa: B009

    data = Broken(tmp_path / "cache")
    with pytest.raises(OSError, match="the disk is full"):
        data.load()
    with pytest.raises(DataError, match="cannot be prepared.*'missing_attribute'"):
        fg.Engine(epochs=1).fit(Line, data)


PROGRAM = """
import json, os, sys, time
from pathlib import Path
import jax
from fulgurite_data import DataModule
from fulgurite_sharding import initialize_distributed


class Shared(DataModule):
    folder = Path(sys.argv[1])

    def prepare(self):
        with open(self.folder / "calls", "a") as file:
            file.write(f"{jax.process_index()}\\n")
        if sys.argv[2] == "fail":
            raise OSError("the disk is full")
        (self.folder / "data").write_text("prepared")

    def setup(self):
        self.text = (self.folder / "data").read_text()


initialize_distributed()
data = Shared()
try:
    data.load()
    print(json.dumps({"text": data.text}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.mark.full
@pytest.mark.parametrize("outcome", ["succeed", pytest.param("fail", marks=pytest.mark.slow)])
def test_one_process_prepares_and_all_learn_how_it_went(outcome, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-c",
        "from fulgurite_cli.command import main; raise SystemExit(main())",
        "launch",
        "--processes",
        "2",
        str(program),
        str(tmp_path / "cache"),
        outcome,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line.partition("{") for line in ended.stdout.splitlines() if "{" in line]
    results = [json.loads("{" + rest) for _, _, rest in sorted(lines)]
    assert (tmp_path / "cache" / "calls").read_text() == "0\n"
    if outcome == "succeed":
        assert results == [{"text": "prepared"}] * 2
    else:
        assert results[0] == {"error": "the disk is full"}
        assert "process 0 failed to prepare the data of Shared" in results[1]["error"]
