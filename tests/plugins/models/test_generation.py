"""What a model writes with a cache is what it writes without one, by plain JAX."""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite_models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    Sampling,
    TextSamples,
    compute_logits,
    generate,
    next_token_loss,
)
from fulgurite_testing import check_plugin

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
NEW = 6


def sharpen(model: Any) -> Any:
    """Make blocks weigh more than the token itself, so that a wrong choice shows."""
    blocks = jax.tree.map(lambda leaf: 5 * leaf if eqx.is_array(leaf) else leaf, model.blocks)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return sharpen(GPT2(GPT2Config(32, 16, 16, 2, 2, dropout=0.1), key=jax.random.key(0)))


@pytest.fixture(scope="module")
def llama() -> Any:
    config = LlamaConfig(32, 16, 2, 4, 2, 24, is_tied=True)
    return sharpen(Llama(config, key=jax.random.key(1)))


def write_without_cache(model: Any, prompt: list[int], choose: Any) -> list[int]:
    """Run the model over all tokens again for each new one."""
    apply = eqx.filter_jit(eqx.nn.inference_mode(model))
    tokens = list(prompt)
    for step in range(NEW):
        # Padded on the right, so that there is one program; a token sees none after it.
        row = jnp.array(tokens + [0] * (11 - len(tokens)))
        tokens.append(int(choose(apply(row)[len(tokens) - 1], step)))
    return tokens[len(prompt) :]


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_most_probable_tokens_are_those_without_a_cache(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Prompts of three lengths in one batch."""
    model = request.getfixturevalue(name)
    generated = generate(model, PROMPTS, NEW)
    expected = [
        write_without_cache(model, prompt, lambda logits, step: jnp.argmax(logits))
        for prompt in PROMPTS
    ]
    assert generated.as_lists() == expected
    assert len({token for row in expected for token in row}) > 4
    alone = [generate(model, [prompt], NEW).as_lists()[0] for prompt in PROMPTS[:1]]
    assert alone == expected[:1]


@pytest.mark.full
def test_drawn_tokens_are_those_drawn_without_a_cache(llama: Any) -> None:
    sampling = Sampling(temperature=0.7, top_k=12, top_p=0.9)
    key = jax.random.key(5)
    generated = generate(llama, PROMPTS, NEW, sampling=sampling, key=key)
    for row, prompt in enumerate(PROMPTS):
        row_key = jax.random.fold_in(key, row)

        def draw(logits: Any, step: int, row_key: Any = row_key) -> Any:
            allowed = filter_by_hand(np.asarray(logits, np.float64), 0.7, 12, 0.9)
            return jax.random.categorical(jax.random.fold_in(row_key, step), jnp.array(allowed))

        assert generated.as_lists()[row] == write_without_cache(llama, prompt, draw)
    other = generate(llama, PROMPTS, NEW, sampling=sampling, key=jax.random.key(6))
    assert other.as_lists() != generated.as_lists()


def filter_by_hand(logits: Any, temperature: float, top_k: int, top_p: float) -> Any:
    """The logits that may be drawn, by a loop over the sorted tokens."""
    logits = logits / temperature
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    powers = np.array([np.exp(logits[token] - logits[order[0]]) for token in order])
    probabilities = powers / powers.sum()
    result = np.full(len(logits), -np.inf)
    total = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if total >= top_p:
            break
        result[token] = logits[token]
        total += probability
    return result


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 0.5), (None, None), (1, None), (None, 0.3), (100, 1.0)]
)
def test_logits_that_may_be_drawn_are_those_by_hand(top_k: Any, top_p: Any) -> None:
    logits = np.random.default_rng(0).normal(size=40) * 3
    filtered = Sampling(1.5, top_k, top_p).filter_logits(jnp.array(logits))
    expected = filter_by_hand(logits, 1.5, top_k or 40, top_p or 2.0)
    np.testing.assert_allclose(filtered, expected, rtol=1e-5)


@pytest.mark.full
def test_a_row_ends_with_its_end_token_and_the_others_go_on(gpt2: Any) -> None:
    whole = generate(gpt2, PROMPTS, NEW).as_lists()
    end = whole[0][2]
    generated = generate(gpt2, PROMPTS, NEW, end=end)
    expected = [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert generated.as_lists() == expected
    assert not generated.tokens[0, 3:].any()
    either = generate(gpt2, PROMPTS, NEW, end=[row[0] for row in whole])
    assert [len(row) for row in either.as_lists()] == [1, 1, 1]


def test_what_cannot_be_generated_is_an_error(gpt2: Any) -> None:
    with pytest.raises(ConfigurationError, match="prompt 1 is .*at least one token"):
        generate(gpt2, [[1], []], 2)
    with pytest.raises(ConfigurationError, match="there is no prompt"):
        generate(gpt2, [], 2)
    with pytest.raises(
        ConfigurationError,
        match="has 16 positions, and the longest prompt with max_new_tokens has 17",
    ):
        generate(gpt2, [[1]], 16)
    with pytest.raises(ConfigurationError, match="give key="):
        generate(gpt2, [[1]], 2, sampling=Sampling(1.0))
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        generate(gpt2, [[1]], 0)
    with pytest.raises(ConfigurationError, match="max_new_tokens is 2.5"):
        generate(gpt2, [[1]], 2.5)  # type: ignore[arg-type]


def test_a_sampling_that_is_none_is_an_error_that_says_what_it_may_be() -> None:
    faulty: dict[str, dict[str, Any]] = {
        "temperature is -1.0; it must be a finite number, at least 0": {"temperature": -1.0},
        "temperature is inf; it must be a finite number": {"temperature": float("inf")},
        "temperature is nan; it must be a finite number": {"temperature": float("nan")},
        "temperature is '1'; it must be a finite number": {"temperature": "1"},
        "temperature is True; it must be a finite number": {"temperature": True},
        "top_k is 0; it must be a positive integer, or None": {"temperature": 1.0, "top_k": 0},
        "top_k is 2.5; it must be a positive integer": {"temperature": 1.0, "top_k": 2.5},
        "top_k is True; it must be a positive integer": {"temperature": 1.0, "top_k": True},
        "top_p is 0.0; it must be a number above 0": {"temperature": 1.0, "top_p": 0.0},
        "top_p is 1.5; it must be a number above 0 and at most 1": {"temperature": 1, "top_p": 1.5},
        "top_p is nan; it must be a number": {"temperature": 1.0, "top_p": float("nan")},
        "top_p is '0.9'; it must be a number": {"temperature": 1.0, "top_p": "0.9"},
        "top_k and top_p have no effect with temperature=0": {"top_k": 3},
    }
    for text, options in faulty.items():
        with pytest.raises(ConfigurationError, match=f"Sampling: {re.escape(text)}"):
            Sampling(**options)
    sampling = Sampling(np.float32(0.5), np.int64(3), np.float64(0.5))  # type: ignore[arg-type]
    assert sampling == Sampling(0.5, 3, 0.5)


@pytest.mark.usefixtures("unchecked")
def test_prompts_of_odd_shapes_are_errors_that_say_what_they_are(gpt2: Any) -> None:
    faulty: dict[str, Any] = {
        "prompts is 3; give a list of lists of tokens": 3,
        "prompts is 'text'; give a list of lists of tokens": "text",
        "prompt 0 is int64[]; it must be a list of at least one token, each an integer: give": [1],
        "prompt 1 is empty; it must be": [[1], []],
        "prompt 0 is empty; it must be": np.zeros((1, 0), int),
        "prompt 0 is a list of lists of unequal length": [[[1], [2, 3]]],
        "prompt 0 is int64[1, 2]; it must be": [[[1, 2]]],
        "prompt 1 is float64[2]; it must be": [[1], [1.0, 2.0]],
        "prompt 0 is bool[1]; it must be": [[True]],
        "prompt 0 is a string; it must be": ["text"],
        "prompt 0 has the token -100, and the tokens of GPT2 are 0 to 31": [[-100]],
    }
    for text, prompts in faulty.items():
        with pytest.raises(ConfigurationError, match=re.escape(f"generate: {text}")):
            generate(gpt2, prompts, 2)
    ends: dict[str, Any] = {
        "end is 1.5; it must be a token": 1.5,
        "end is 'stop'; it must be a token": "stop",
        "end is [[1]]; it must be a token": [[1]],
        "end has the token 32, and the tokens of GPT2 are 0 to 31": [1, 32],
    }
    for text, end in ends.items():
        with pytest.raises(ConfigurationError, match=re.escape(f"generate: {text}")):
            generate(gpt2, [[1]], 2, end=end)


# --- while it is trained --------------------------------------------------------------------------


class Records:
    """Keeps the text of records."""

    def __init__(self) -> None:
        self.texts: dict[int, dict[str, str]] = {}

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "text" and record.source == "text_samples":
            self.texts[record.step] = dict(record.values)


def make_task(key: Any) -> fg.Task:
    gpt2 = sharpen(GPT2(GPT2Config(32, 16, 16, 2, 2), key=key))
    return fg.Task(gpt2, loss=next_token_loss, optimizer=optax.adam(1e-2))


def make_data() -> fg.ArrayData:
    return fg.ArrayData((np.random.default_rng(0).integers(0, 32, (16, 8)),), 8)


@pytest.mark.full
def test_samples_are_records_of_what_the_model_of_that_step_writes() -> None:
    records = Records()
    samples = TextSamples(
        ["ab", [4]],
        every=2,
        encode=lambda text: [ord(letter) - ord("a") for letter in text],
        decode=lambda tokens: "".join(chr(ord("a") + token) for token in tokens),
        max_new_tokens=3,
    )
    result = fg.Engine(steps=4, plugins=[samples, records]).fit(make_task, make_data())
    assert records.texts.keys() == {2, 4}
    rows = generate(result.module.model, [[0, 1], [4]], 3).as_lists()
    expected = ["".join(chr(ord("a") + token) for token in row) for row in rows]
    assert records.texts[4] == {"0": expected[0], "1": expected[1]}


@pytest.mark.full
def test_samples_without_a_tokenizer_are_numbers_and_need_a_language_model() -> None:
    records = Records()
    drawn = TextSamples([[1, 2]], every=1, max_new_tokens=2, sampling=Sampling(1.0))
    fg.Engine(steps=1, plugins=[drawn, records]).fit(make_task, make_data())
    assert all(token.isdecimal() for token in records.texts[1]["0"].split())
    with pytest.raises(ConfigurationError, match="encode= is missing"):
        TextSamples(["text"], every=1)
    for prompts in ("text", []):  # each letter would be a prompt, or there would be none
        with pytest.raises(ConfigurationError, match="give a list of at least one prompt"):
            TextSamples(prompts, every=1, encode=lambda text: [1])
    assert len(TextSamples((row for row in [[1], [2]]), every=1).prompts) == 2  # type: ignore[arg-type]
    other = fg.Task(
        eqx.nn.MLP(8, 1, 4, 1, key=jax.random.key(0)),
        loss=lambda preds, batch: preds[:, 0] ** 2,
        optimizer=optax.sgd(0.1),
        forward=lambda model, batch, ctx: jax.vmap(model)(batch[0].astype(jnp.float32)),
    )
    with pytest.raises(ConfigurationError, match="has 0 language models"):
        fg.Engine(steps=1, plugins=[drawn]).fit(other, make_data())


@pytest.mark.full
def test_what_is_no_token_of_the_vocabulary_is_refused() -> None:
    gpt2 = GPT2(GPT2Config(16, 8, 8, 2, 2), key=jax.random.key(0))
    for token in (16, -1, -100):
        with pytest.raises(ConfigurationError, match=f"prompt 1 has the token {token}, and the"):
            generate(gpt2, [[1, 2], [3, token]], 2)
        logits = gpt2(jnp.array([3, token, 4]), key=jax.random.key(0))
        assert np.isnan(logits[1]).all()
    with pytest.raises(ConfigurationError, match=r"Task is not a language model .* task.model"):
        generate(fg.Task(gpt2), [[1]], 2)  # type: ignore[arg-type]


def compute_losses(logits: Any, tokens: Any) -> Any:
    """The cross-entropy of each next token, by NumPy."""
    shifted = logits[:, :-1] - np.log(np.exp(logits[:, :-1]).sum(-1, keepdims=True))
    return -np.take_along_axis(shifted, tokens[:, 1:, None], -1)[..., 0]


def test_the_loss_of_next_tokens_is_a_mean_over_those_that_are_predicted() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, 5)).astype(np.float32)
    tokens = rng.integers(0, 5, (2, 4))
    losses = compute_losses(logits, tokens)
    mask = np.array([[True, True, True, False], [True, False, False, False]])
    segments = np.array([[1, 1, 2, 2], [1, 0, 0, 0]])
    ones, zeros = np.ones((2, 3), bool), np.zeros((2, 3), bool)
    first = np.array([[True, True, True], [False, False, False]])
    within = np.array([[True, False, True], [False, False, False]])
    cases = [
        (tokens, None, ones),
        ((tokens,), None, ones),
        ([tokens], None, ones),
        ({"tokens": tokens}, None, ones),
        ((tokens, mask), None, mask[:, 1:]),
        ({"tokens": tokens, "mask": mask}, None, mask[:, 1:]),
        ((tokens,), np.array([True, False]), first),
        ({"tokens": tokens, "segments": segments, "positions": segments}, None, within),
        ({"tokens": tokens, "segments": segments, "mask": mask}, None, within & mask[:, 1:]),
        ((tokens, ~mask & mask), None, zeros),
    ]
    for batch, examples, counts in cases:
        arrays = jax.tree.map(jnp.asarray, batch)
        mean = next_token_loss(
            jnp.asarray(logits), arrays, mask=jax.tree.map(jnp.asarray, examples)
        )
        assert mean.weight.compute() == counts.sum()
        if counts.any():
            np.testing.assert_allclose(mean.compute(), losses[counts].mean(), rtol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_loss_of_other_tokens_than_the_logits_are_of_is_no_number() -> None:
    logits = jnp.zeros((1, 3, 5))
    for label in (5, -1, -5):
        tokens = jnp.array([[1, 2, label]])
        assert np.isnan(next_token_loss(logits, tokens).compute())
        masked = next_token_loss(logits, (tokens, jnp.array([[True, True, False]])))
        np.testing.assert_allclose(masked.compute(), np.log(5), rtol=1e-6)
    for shape in ((4, 3), (1, 2), (1, 4)):
        with pytest.raises(ModelError, match=r"the logits are float32\[1, 3, 5\], and the tokens"):
            next_token_loss(logits, jnp.zeros(shape, int))


@pytest.mark.usefixtures("unchecked")
def test_a_batch_that_is_no_rows_of_tokens_is_an_error() -> None:
    logits, tokens = jnp.zeros((2, 4, 5)), jnp.zeros((2, 4), int)
    faulty: dict[str, Any] = {
        "it may have tokens, mask, segments, positions": {"text": tokens},
        "has the arrays tokens, labels; it may have": {"tokens": tokens, "labels": tokens},
        "a batch of tokens has 3 arrays; it is (tokens,) or (tokens, mask)": (tokens,) * 3,
        "mask of a batch of tokens are int32[2, 4]; they must be bools, as mask != 0": (
            tokens,
            tokens,
        ),
        "mask of a batch of tokens are bool[2]; they must be bools": (tokens, jnp.ones(2, bool)),
        "segments of a batch of tokens are int32[4]; they must be integers [2, 4]": {
            "tokens": tokens,
            "segments": tokens[0],
        },
        "the tokens of a batch are int32[4]; they must be integers [batch, time]": tokens[0],
        "tokens of a batch of tokens are float32[2, 4]; they must be integers": (logits[..., 0],),
        "the tokens are int32[2, 1]: a row needs at least two": (tokens[:, :1],),
    }
    for text, batch in faulty.items():
        with pytest.raises(ModelError, match=re.escape(text)):
            next_token_loss(logits, batch)


@pytest.mark.full
def test_rows_with_padding_and_packed_rows_are_trained_as_the_documents_alone() -> None:
    """A first step of the loss over two documents: padded, packed in one row, and one by one."""
    documents = [np.array([1, 2, 3, 4, 5]), np.array([6, 7, 8])]
    padded = np.zeros((2, 8), np.int32)
    for row, document in zip(padded, documents, strict=True):
        row[: len(document)] = document
    mask = np.array([[True] * 5 + [False] * 3, [True] * 3 + [False] * 5])
    joined = np.concatenate(documents)[None].astype(np.int32)
    packed = {
        "tokens": joined,
        "segments": np.repeat([1, 2], [5, 3])[None].astype(np.int32),
        "positions": np.array([[0, 1, 2, 3, 4, 0, 1, 2]], np.int32),
    }
    model = make_task(jax.random.key(0)).model
    losses = [
        compute_losses(np.asarray(model(jnp.asarray(document)))[None], document[None])[0]
        for document in documents
    ]
    expected = np.concatenate(losses).mean()
    for batch in ((padded, mask), packed):
        task = fg.Task(
            model, loss=next_token_loss, optimizer=optax.sgd(0.1), forward=compute_logits
        )
        loss = fg.Engine(autoload=False).evaluate(task, [batch])["loss"]
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_the_plugin_keeps_its_promises() -> None:

    def make_plugin() -> TextSamples:
        return TextSamples([[1]], every=2, max_new_tokens=2)

    def make_data_with_floats() -> fg.ArrayData:
        tokens = np.random.default_rng(0).integers(0, 32, (16, 8))
        return fg.ArrayData((tokens, np.zeros((16, 1), np.float32)), 8)

    def make_task_of_tokens(key: Any) -> fg.Task:
        def compute_loss(logits: Any, batch: Any) -> Any:
            return next_token_loss(logits, batch[:1])

        return fg.Task(make_task(key).model, loss=compute_loss, optimizer=optax.adam(1e-2))

    # Text is made of tokens on the host, so that it waits for them.
    check_plugin(
        make_plugin, model=make_task_of_tokens, data=make_data_with_floats, skip=["no_sync"]
    )


@pytest.mark.full
def test_a_loss_falls_with_adapters_alone_in_scanned_blocks(tmp_path: Path) -> None:
    """Dropout of adapters draws its keys within the scan."""
    from fulgurite_lora import Lora, merge, remove_adapters

    tokens = np.tile(np.arange(8), (16, 1))
    lora = Lora("**.attention", rank=2, dropout=0.1)
    engine = fg.Engine(steps=30, log_every=10, plugins=[lora])
    result = engine.fit(make_task, fg.ArrayData((tokens,), 8))
    losses = result.history["train/loss"]
    assert losses[-1] < losses[0]
    merged = remove_adapters(merge(result.module)).model
    logits = jax.vmap(eqx.nn.inference_mode(merged))(tokens)
    expected = jax.vmap(eqx.nn.inference_mode(result.module).model)(tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
