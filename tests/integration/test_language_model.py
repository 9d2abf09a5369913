"""A language model with padding, accumulation, bfloat16 and evaluation after each epoch, beside a
loop by hand that sees each batch whole."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import GradientAccumulation
from fulgurite_precision import Precision

pytestmark = pytest.mark.full

VOCABULARY = 11
PADDING = 0
NUM_EPOCHS = 3
BATCH_SIZE = 16


class LanguageModel(fg.Module):
    embedding: jax.Array
    mixing: jax.Array
    head: jax.Array

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = 0.3 * jax.random.normal(keys[0], (VOCABULARY, 16))
        self.mixing = 0.3 * jax.random.normal(keys[1], (16, 16))
        self.head = 0.3 * jax.random.normal(keys[2], (16, VOCABULARY))

    def compute_logits(self, tokens: Any) -> Any:
        hidden = jnp.cumsum(self.embedding[tokens], axis=1)
        return jnp.tanh(hidden @ self.mixing) @ self.head

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = self.compute_logits(batch["tokens"][:, :-1]).astype(jnp.float32)
        targets = batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return fg.Output(fg.metrics.Mean.from_values(losses, targets != PADDING))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def make_sentences(number: int, seed: int) -> np.ndarray:
    """Sentences of 0 to 9 tokens in rows of 10, the rest is padding; some have no token at all."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, (number, 10))
    lengths = rng.integers(0, 10, number)
    lengths[:4] = 0
    return np.where(np.arange(10) < lengths[:, None], tokens, PADDING).astype(np.int32)


def compute_loss_by_hand(params: dict[str, Any], tokens: np.ndarray) -> Any:
    """The mean over all tokens that are not padding, computed in bfloat16, summed in float32."""
    half = {name: array.astype(jnp.bfloat16) for name, array in params.items()}
    hidden = jnp.cumsum(half["embedding"][tokens[:, :-1]], axis=1)
    logits = (jnp.tanh(hidden @ half["mixing"]) @ half["head"]).astype(jnp.float32)
    targets = tokens[:, 1:]
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    is_token = targets != PADDING
    return -jnp.sum(jnp.where(is_token, picked, 0)) / jnp.sum(is_token)


def train_by_hand(
    module: LanguageModel, train: np.ndarray, test: np.ndarray
) -> tuple[list[float], list[float]]:
    """Return the loss of each step, and that of the test set after each epoch."""
    params: Any = {name: getattr(module, name) for name in ("embedding", "mixing", "head")}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    step = jax.jit(jax.value_and_grad(compute_loss_by_hand))
    losses = []
    test_losses = []
    for _ in range(NUM_EPOCHS):
        for start in range(0, len(train), BATCH_SIZE):
            loss, grads = step(params, train[start : start + BATCH_SIZE])
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
        test_losses.append(float(compute_loss_by_hand(params, test)))
    return losses, test_losses


@pytest.mark.parametrize("batch_size", [7, 30])
def test_a_language_model_has_the_losses_of_a_loop_by_hand_at_every_step(batch_size: int) -> None:
    """Of the test set, too, in one batch or in five of unequal size."""
    train, test = make_sentences(64, 0), make_sentences(30, 1)
    module = LanguageModel(key=jax.random.key(0))
    losses, test_losses = train_by_hand(module, train, test)
    evaluator = Evaluator("test", fg.ArrayData({"tokens": test}, batch_size), every=fg.EveryEpoch())
    engine = fg.Engine(
        epochs=NUM_EPOCHS,
        log_every=1,
        autoload=False,
        plugins=[Precision("bf16"), GradientAccumulation(4), evaluator],
    )
    result = engine.fit(module, fg.ArrayData({"tokens": train}, BATCH_SIZE))
    # A bfloat16 number has 8 bits; in a sum over a batch most of its rounding cancels.
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=5e-4)
    np.testing.assert_allclose(result.history["test/loss"], test_losses, rtol=5e-4)
    assert losses[-1] < losses[0] - 0.3
    assert result.messages == []


def test_accumulation_refuses_the_same_model_without_the_weight_of_its_loss() -> None:
    class WithoutWeight(LanguageModel):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(0.5 * LanguageModel.training_step(self, batch, ctx).loss.compute())

    engine = fg.Engine(steps=1, autoload=False, plugins=[GradientAccumulation(4)])
    data = fg.ArrayData({"tokens": make_sentences(64, 0)}, BATCH_SIZE)
    with pytest.raises(ModelError, match=r"the loss of 4 examples is .* weight=\.\.\."):
        engine.fit(WithoutWeight, data)
