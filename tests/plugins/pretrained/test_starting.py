"""`init_from=` and `weights=` take weights of others, beside checkpoints."""

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
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, FulguriteError
from fulgurite_checkpoint import Checkpointer
from fulgurite_precision import Precision
from fulgurite_pretrained import Pretrained, find_folder, save_safetensors
from fulgurite_testing import check_plugin

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
DATA = fg.ArrayData((X, X.sum(1)), 8)
NAMES = {"fc1.weight": "layers[0].weight", "fc1.bias": "layers[0].bias"}
NAMES |= {"fc2.weight": "layers[1].weight", "fc2.bias": "layers[1].bias"}


def make_mlp(seed: int, outputs: int = 1) -> eqx.nn.MLP:
    return eqx.nn.MLP(3, outputs, 4, 1, key=jax.random.key(seed))


def make_task(key: Any) -> fg.Task:
    return fg.Task(
        eqx.nn.MLP(3, 1, 4, 1, key=key),
        loss=lambda preds, batch: (preds[:, 0] - batch[1]) ** 2,
        optimizer=optax.sgd(0.1),
    )


def compute_loss(mlp: Any) -> float:
    """The mean squared error by plain JAX."""
    return float(jnp.mean((jax.vmap(mlp)(X)[:, 0] - X.sum(1)) ** 2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.safetensors"
    save_safetensors(make_mlp(7), path, map=NAMES)
    return path


def test_a_fit_begins_with_a_file_and_an_evaluation_measures_it(file: Path, tmp_path: Path) -> None:
    """Beside a checkpointer, which reads every other path."""
    plugins = [Pretrained(NAMES, into="model"), Checkpointer(1)]
    engine = fg.Engine(steps=1, run_dir=tmp_path / "run", log_every=1, plugins=plugins)
    result = engine.fit(make_task, DATA, init_from=file)
    assert result.history["train/loss"][0] == pytest.approx(compute_loss(make_mlp(7)), rel=1e-6)
    loss = engine.evaluate(make_task, DATA, weights=str(file))["loss"]
    assert loss == pytest.approx(compute_loss(make_mlp(7)), rel=1e-6)
    trained = engine.evaluate(make_task, DATA, weights=tmp_path / "run")
    assert trained == engine.evaluate(result, DATA)
    preds = engine.predict(make_task, DATA, weights=file)
    np.testing.assert_allclose(np.asarray(preds), jax.vmap(make_mlp(7))(jnp.asarray(X)), rtol=1e-6)


@pytest.mark.full
def test_weights_of_another_dtype_are_read_where_that_is_asked_for(
    file: Path, tmp_path: Path
) -> None:
    """Of files and of checkpoints; the refusal names what helps."""
    run = tmp_path / "run"
    trained = fg.Engine(steps=1, run_dir=run, plugins=[Checkpointer(1)]).fit(make_task, DATA)
    plugins = [Pretrained(NAMES, into="model"), Checkpointer(1), Precision("bf16-true")]
    engine = fg.Engine(steps=1, plugins=plugins)
    for path, model in ((file, make_mlp(7)), (run, trained.module.model)):
        with pytest.raises(CheckpointError, match=r"(?s)float32.*bfloat16.*dtype='match'.* casts"):
            engine.evaluate(make_task, DATA, weights=path)
        loss = engine.evaluate(make_task, DATA, weights=fg.CheckpointRef(path, dtype="match"))
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
        preds = jax.vmap(half)(X.astype(jnp.bfloat16))[:, 0].astype(jnp.float32)
        expected = jnp.mean((preds - X.sum(1)) ** 2)
        assert loss["loss"] == pytest.approx(float(expected), rel=2e-2)
    begun = fg.Engine(steps=1, run_dir=tmp_path / "new", plugins=plugins).fit(
        make_task, DATA, init_from=fg.CheckpointRef(run, dtype="match")
    )
    assert begun.module.model.layers[0].weight.dtype == jnp.bfloat16


@pytest.mark.full
def test_what_fits_is_taken_past_another_head(file: Path) -> None:
    save_safetensors(make_mlp(7, outputs=5), file, map=NAMES)
    engine = fg.Engine(steps=1, plugins=[Pretrained(NAMES, into="model")])
    with pytest.raises(CheckpointError, match=r"fc2.weight is float32\[5, 4\]"):
        engine.load_weights(make_task, file)
    with pytest.warns(UserWarning, match=r"(?s)2 of its 4 arrays.*fc2.weight is float32\[5, 4\]"):
        state = engine.load_weights(make_task, fg.CheckpointRef(file, strict=False))
    first = state.module.model.layers[0].weight
    assert jnp.array_equal(first, make_mlp(7).layers[0].weight)
    assert state.module.model.layers[1].weight.shape == (1, 4)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, make_mlp(7, 5))
    save_safetensors(half, file, map=NAMES)
    with pytest.warns(UserWarning, match="2 of its 4 arrays"):
        state = engine.load_weights(make_task, fg.CheckpointRef(file, strict=False))
    first = state.module.model.layers[0].weight
    assert jnp.array_equal(first, half.layers[0].weight.astype(jnp.float32))


def test_what_a_file_has_not_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fg.Engine(steps=1, plugins=[Pretrained(NAMES, into="model")])
    faulty: list[dict[str, Any]] = [{"step": 3}, {"map": {"module": "module"}}]
    for options in faulty:
        with pytest.raises(ConfigurationError, match="Leave map and step of the reference out"):
            engine.evaluate(make_task, DATA, weights=fg.CheckpointRef(file, **options))
    plain = fg.Engine(steps=1, plugins=[Pretrained()])
    with pytest.raises(CheckpointError, match="fc1.weight of the file.* is not in the map"):
        plain.evaluate(make_task, DATA, weights=file)
    save_safetensors(make_task(jax.random.key(3)), tmp_path / "own.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    loss = plain.evaluate(make_task, DATA, weights="~/own.safetensors")["loss"]
    assert loss == pytest.approx(compute_loss(make_mlp(3)), rel=1e-6)


def test_a_file_without_a_map_fills_a_list_or_an_item_of_it(tmp_path: Path) -> None:
    mlp = make_mlp(3)
    save_safetensors(mlp.layers, tmp_path / "list.safetensors")
    save_safetensors(mlp.layers[1], tmp_path / "item.safetensors")
    for into, file in (("model.layers", "list"), ("model.layers[1]", "item")):
        engine = fg.Engine(plugins=[Pretrained(into=into)])
        state = engine.load_weights(make_task, tmp_path / f"{file}.safetensors")
        assert eqx.tree_equal(state.module.model.layers[1], mlp.layers[1])
    wrong = fg.Engine(plugins=[Pretrained(into="modle")])
    with pytest.raises(ConfigurationError, match="Task has no arrays below into='modle'"):
        wrong.load_weights(make_task, tmp_path / "list.safetensors")


def test_without_the_plugin_an_error_names_it(file: Path, tmp_path: Path) -> None:
    """With a checkpointer and without; also where transformers wrote a pickle."""
    for plugins in ([], [Checkpointer(1)]):
        for source in (file, file.parent):
            with pytest.raises(FulguriteError, match="Pretrained of fulgurite-pretrained"):
                fg.Engine(steps=1, plugins=plugins).load_weights(make_task, source)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    reader = fg.Engine(steps=1, plugins=[Pretrained(), Checkpointer(1)])
    with pytest.raises(CheckpointError, match="may hold a pickle"):
        reader.load_weights(make_task, tmp_path / "old")
    with pytest.raises(CheckpointError, match="there is no run in .*none: check the path"):
        reader.load_weights(make_task, tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"folder org/name: check .*find_folder\('org/name'"):
        fg.Engine(steps=1, plugins=[Pretrained()]).load_weights(make_task, "org/name")


def test_a_name_on_the_hub_is_the_folder_that_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a net, of what is in the cache of huggingface-hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--tiny--llama"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    assert find_folder("tiny/llama") == snapshot
    assert find_folder("tiny/llama", revision="a" * 40) == snapshot
    for name, revision in (("tiny/llama", "other"), ("tiny/lama", None)):
        with pytest.raises(CheckpointError, match=f"no folder {name}, and the hub gave none"):
            find_folder(name, revision)
    with pytest.raises(CheckpointError, match="there is no folder ../llama: check the path"):
        find_folder("../llama")


@pytest.mark.full
def test_the_plugin_keeps_its_promises() -> None:
    check_plugin(Pretrained)


@pytest.mark.full
def test_each_device_reads_its_own_piece_of_a_file(tmp_path: Path) -> None:
    program = Path(__file__).with_name("sharded_loading.py")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run(
        [sys.executable, program, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.endswith("loaded\n"), run.stderr
