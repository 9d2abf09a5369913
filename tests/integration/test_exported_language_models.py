"""Language models of fulgurite-models as folders that JAX alone runs, for texts of any length."""

from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from elsewhere import Call, compute_elsewhere
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite_export import Function, InputError, export, load
from fulgurite_models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    Sampling,
    generate,
    make_generate_function,
)

GPT2_CONFIG = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
LLAMA_CONFIG = LlamaConfig(64, 32, 2, 4, 2, 64)


def predict(model: Any, batch: Any, ctx: fg.Context) -> Any:
    return jax.vmap(model)(batch["tokens"])


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        pytest.param(GPT2, GPT2_CONFIG, id="gpt2", marks=pytest.mark.slow),
        pytest.param(Llama, LLAMA_CONFIG, id="llama", marks=pytest.mark.slow),
    ],
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


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
NEW = 6


def sharpen(model: Any) -> Any:
    """Make blocks weigh more than the token itself, so that a wrong choice shows."""
    blocks = jax.tree.map(lambda leaf: 5 * leaf if eqx.is_array(leaf) else leaf, model.blocks)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


def make_inputs(length: int) -> dict[str, Any]:
    """The prompts, padded on their left, with a row that has a token of another vocabulary and one
    that has no token at all."""
    rows = [*PROMPTS, [3, 64], []]
    return {
        "tokens": np.array([[60] * (length - len(row)) + row for row in rows], np.int32),
        "padding": np.array([length - len(row) for row in rows], np.int32),
        "key": np.asarray(jax.random.key_data(jax.random.key(7))),
    }


def make_function(call: Any) -> Function:
    return Function(
        "generate",
        call=call,
        inputs=make_inputs(5),
        shapes={"tokens": "batch, length", "key": "2"},
        constraints=[f"length <= {32 - NEW}"],
    )


@pytest.mark.slow
def test_generate_is_exported_with_the_tokens_that_it_gives_here(tmp_path: Path) -> None:
    """The most probable tokens, up to an end token, and drawn ones, after prompts of several
    lengths, where neither Equinox nor Fulgurite can be imported."""
    gpt2 = sharpen(GPT2(GPT2_CONFIG, key=jax.random.key(0)))
    llama = sharpen(Llama(LLAMA_CONFIG, key=jax.random.key(1)))
    end = generate(gpt2, PROMPTS, NEW).as_lists()[0][2]
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9)
    drawn_call = make_generate_function(NEW, sampling=sampling)
    export(
        fg.Task(gpt2, forward=predict),
        tmp_path / "gpt2",
        inputs={"tokens": np.zeros((1, 4), np.int32)},
        functions=["predict", make_function(make_generate_function(NEW, end=end))],
        platforms=["cpu"],
    )
    export(llama, tmp_path / "llama", functions=[make_function(drawn_call)], platforms=["cpu"])
    greedy_inputs = make_inputs(5)
    del greedy_inputs["key"]
    calls = [
        Call(tmp_path / "gpt2", "generate", greedy_inputs),
        Call(tmp_path / "llama", "generate", make_inputs(5)),
        Call(tmp_path / "llama", "generate", make_inputs(8)),
    ]
    greedy, drawn, longer = compute_elsewhere(calls)
    expected = generate(gpt2, PROMPTS, NEW, end=end)
    assert len({*map(len, expected.as_lists())}) > 1
    assert len({token for row in expected.as_lists() for token in row}) > 3
    check_generated(greedy, expected)
    expected = generate(llama, PROMPTS, NEW, sampling=sampling, key=jax.random.key(7))
    check_generated(drawn, expected)
    # What is padded further is what it was.
    check_generated(longer, expected)


def check_generated(outputs: dict[str, np.ndarray], expected: Any) -> None:
    np.testing.assert_array_equal(outputs["tokens"][:3], expected.tokens)
    np.testing.assert_array_equal(outputs["lengths"], [*np.asarray(expected.lengths), -1, -1])
    assert not outputs["tokens"][3:].any()


@pytest.mark.full
def test_what_cannot_be_generated_is_an_error_where_it_is_exported(tmp_path: Path) -> None:
    gpt2 = GPT2(GPT2_CONFIG, key=jax.random.key(0))
    call = make_generate_function(NEW)
    open_length = Function(
        "generate", call, make_inputs(5), {"tokens": "batch, length", "key": "2"}
    )
    with pytest.raises(ModelError, match="depends on a size that is open.*constraints="):
        export(gpt2, tmp_path / "model", functions=[open_length])
    with pytest.raises(ConfigurationError, match="has 32 positions, and the longest prompt"):
        function = Function("generate", call, make_inputs(27), {"key": "2"})
        export(gpt2, tmp_path / "model", functions=[function])
    inputs = make_inputs(5)
    del inputs["padding"]
    with pytest.raises(ConfigurationError, match="the batch has no 'padding'; it needs tokens"):
        export(
            gpt2, tmp_path / "model", functions=[Function("generate", call, inputs, {"key": "2"})]
        )
    with pytest.raises(ConfigurationError, match="Linear has 0 language models"):
        linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        export(linear, tmp_path / "model", functions=[make_function(call)])
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        make_generate_function(0)
    assert not [*tmp_path.iterdir()]
