"""The models are trained as any other: from a folder, with adapters, on several devices."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_lora import Lora
from fulgurite_models import GPT2, GPT2Config, next_token_loss
from fulgurite_pretrained import Pretrained, from_pretrained, save_pretrained

CONFIG = GPT2Config(16, 8, 8, 2, 2)
TOKENS = np.random.default_rng(0).integers(0, 16, (8, 8))
DATA = fg.ArrayData((TOKENS,), 8)


def make_task(key: Any, config: GPT2Config = CONFIG) -> fg.Task:
    return fg.Task(GPT2(config, key=key), loss=next_token_loss, optimizer=optax.sgd(0.1))


def compute_loss(model: Any) -> float:
    """The mean cross-entropy of the next tokens by NumPy."""
    logits = np.asarray(jax.vmap(eqx.nn.inference_mode(model))(TOKENS), np.float64)[:, :-1]
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -float(np.take_along_axis(logits, TOKENS[:, 1:, None], -1).mean())


@pytest.mark.full
def test_the_model_in_a_task_begins_with_a_folder_and_its_adapters_stay(tmp_path: Path) -> None:
    theirs = GPT2(CONFIG, key=jax.random.key(7))
    save_pretrained(theirs, tmp_path / "gpt2")
    lora = Lora("**.attention", rank=2)
    engine = fg.Engine(steps=1, log_every=1, plugins=[Pretrained(), lora])
    result = engine.fit(make_task, DATA, init_from=tmp_path / "gpt2")
    assert result.history["train/loss"][0] == pytest.approx(compute_loss(theirs), rel=1e-5)
    trained = result.module.model.blocks.attention.query
    assert np.array_equal(trained.weight, theirs.blocks.attention.query.weight)
    assert trained.adapters["default"].up.any()
    loss = engine.evaluate(make_task, DATA, weights=tmp_path / "gpt2")["loss"]
    assert loss == pytest.approx(compute_loss(from_pretrained(tmp_path / "gpt2")), rel=1e-5)
    mlp = fg.Task(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), loss=next_token_loss)
    with pytest.raises(ConfigurationError, match="has 0 models of the family of the folder"):
        fg.Engine(plugins=[Pretrained()]).load_weights(mlp, tmp_path / "gpt2")


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.slow)]
)
def test_a_divided_model_trains_and_writes_as_one_on_one_device(layout: str) -> None:
    """In a process with four simulated devices."""
    program = Path(__file__).with_name("divided_training.py")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    run = subprocess.run(
        [sys.executable, program, layout],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.endswith("equal\n"), run.stderr


@pytest.mark.full
def test_a_larger_vocabulary_is_trained_from_what_fits(tmp_path: Path) -> None:
    theirs = GPT2(CONFIG, key=jax.random.key(7))
    save_pretrained(theirs, tmp_path / "gpt2")
    larger = partial(make_task, config=GPT2Config(20, 8, 8, 2, 2))
    engine = fg.Engine(steps=1, plugins=[Pretrained()])
    source = fg.CheckpointRef(tmp_path / "gpt2", strict=False)
    with pytest.warns(UserWarning, match=r"embedding.weight of the module is \[20, 8\]"):
        state = engine.load_weights(larger, source)
    assert state.module.model.embedding.weight.shape == (20, 8)
    assert np.array_equal(state.module.model.positions.weight, theirs.positions.weight)
