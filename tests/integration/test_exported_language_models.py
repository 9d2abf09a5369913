"""Language models of fulgurite-models as folders that JAX alone runs, for texts of any length."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from fulgurite_export import InputError, export, load
from fulgurite_models import GPT2, GPT2Config, Llama, LlamaConfig

GPT2_CONFIG = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
LLAMA_CONFIG = LlamaConfig(64, 32, 2, 4, 2, 64)


def predict(model: Any, batch: Any, ctx: fg.Context) -> Any:
    return jax.vmap(model)(batch["tokens"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_class", "config"), [(GPT2, GPT2_CONFIG), (Llama, LLAMA_CONFIG)], ids=["gpt2", "llama"]
)
def test_a_language_model_is_exported_for_texts_of_any_length(
    tmp_path: Path, model_class: Any, config: Any
) -> None:
    model = eqx.nn.inference_mode(model_class(config, key=jax.random.key(0)))
    example = {"tokens": np.zeros((2, 12), np.int32)}
    export(
        fg.Task(model, forward=predict),
        tmp_path / "exported",
        inputs=example,
        shapes={"tokens": "batch, length"},
        constraints=["length <= 32"],
        platforms=["cpu"],
    )
    function = load(tmp_path / "exported").functions["predict"]
    rng = np.random.default_rng(0)
    for shape in ((2, 12), (3, 7), (1, 32)):
        tokens = rng.integers(0, 64, shape, np.int32)
        expected = jax.vmap(model)(tokens)
        np.testing.assert_allclose(function({"tokens": tokens}), expected, atol=1e-6)
    with pytest.raises(InputError, match="length"):
        function({"tokens": np.zeros((1, 33), np.int32)})
