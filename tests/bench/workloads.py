"""The models and data that benchmarks train, and what loops written by hand share.

`transformer` has 10.2 million parameters in 8 layers. `resnet18` is the network of He et al. (2016,
arXiv:1512.03385) for images of 32 x 32, half as wide, with group normalization in the place of batch
normalization, so that a loop by hand needs no state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

Batch = dict[str, Any]
OPTIMIZER = optax.adam(1e-3)


class Block(eqx.Module):
    """x + linear(relu(linear(x)))."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(width, width, key=keys[0])
        self.second = eqx.nn.Linear(width, width, key=keys[1])

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        return x + self.second(jax.nn.relu(self.first(x)))


class ResidualNetwork(eqx.Module):
    """Many small layers: 48 blocks have 196 arrays, 589 with those of Adam."""

    enter: eqx.nn.Linear
    blocks: list[Block]
    leave: eqx.nn.Linear

    def __init__(self, features: int, width: int, blocks: int, *, key: Key[Array, ""]) -> None:
        first, last, *keys = jax.random.split(key, blocks + 2)
        self.enter = eqx.nn.Linear(features, width, key=first)
        self.blocks = [Block(width, key=key) for key in keys]
        self.leave = eqx.nn.Linear(width, 10, key=last)

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, "10"]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class TransformerBlock(eqx.Module):
    """Causal attention and a perceptron, each on normalized input and added to what came in."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    hidden_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.hidden_norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        normed = jax.vmap(self.attention_norm)(x)
        causal = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + self.attention(normed, normed, normed, mask=causal)
        hidden = jax.vmap(self.up)(jax.vmap(self.hidden_norm)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(hidden))


class Transformer(eqx.Module):
    """A language model over `vocabulary` tokens, with learned positions."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[TransformerBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        depth: int,
        heads: int,
        *,
        key: Key[Array, ""],
    ) -> None:
        first, second, last, *keys = jax.random.split(key, depth + 3)
        self.tokens = eqx.nn.Embedding(vocabulary, width, key=first)
        self.positions = eqx.nn.Embedding(length, width, key=second)
        self.blocks = [TransformerBlock(width, heads, key=key) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, key=last)

    def __call__(self, text: Int[Array, " length"]) -> Float[Array, "length vocabulary"]:
        x = jax.vmap(self.tokens)(text) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda hidden: self.head(self.norm(hidden)))(x)


class ConvolutionBlock(eqx.Module):
    """Two convolutions of 3 x 3, added to the input or to a projection of it."""

    first: eqx.nn.Conv2d
    first_norm: eqx.nn.GroupNorm
    second: eqx.nn.Conv2d
    second_norm: eqx.nn.GroupNorm
    project: eqx.nn.Conv2d | None

    def __init__(self, inputs: int, outputs: int, stride: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        options = {"padding": 1, "use_bias": False}
        self.first = eqx.nn.Conv2d(inputs, outputs, 3, stride, key=keys[0], **options)
        self.first_norm = eqx.nn.GroupNorm(8, outputs)
        self.second = eqx.nn.Conv2d(outputs, outputs, 3, 1, key=keys[1], **options)
        self.second_norm = eqx.nn.GroupNorm(8, outputs)
        self.project = None
        if inputs != outputs:
            self.project = eqx.nn.Conv2d(inputs, outputs, 1, stride, use_bias=False, key=keys[2])

    def __call__(self, x: Float[Array, "inputs h w"]) -> Float[Array, "outputs h2 w2"]:
        shortcut = x if self.project is None else self.project(x)
        x = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(shortcut + self.second_norm(self.second(x)))


class ResNet18(eqx.Module):
    """Eight blocks of two convolutions, as wide as `width` in the first stage."""

    enter: eqx.nn.Conv2d
    enter_norm: eqx.nn.GroupNorm
    blocks: list[ConvolutionBlock]
    leave: eqx.nn.Linear

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        first, last, *keys = jax.random.split(key, 10)
        self.enter = eqx.nn.Conv2d(3, width, 3, padding=1, use_bias=False, key=first)
        self.enter_norm = eqx.nn.GroupNorm(8, width)
        channels = [width, *(width * 2 ** (index // 2) for index in range(8))]
        self.blocks = [
            ConvolutionBlock(inputs, outputs, 2 if outputs > inputs else 1, key=key)
            for inputs, outputs, key in zip(channels[:-1], channels[1:], keys, strict=True)
        ]
        self.leave = eqx.nn.Linear(channels[-1], 10, key=last)

    def __call__(self, x: Float[Array, "3 32 32"]) -> Float[Array, "10"]:
        x = jax.nn.relu(self.enter_norm(self.enter(x)))
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((1, 2)))


@dataclass(frozen=True)
class Workload:
    """A model, its data, and the number of steps in a timed region: about a few tenths of a second
    and more.

    Attributes:
        model: called as `model(key=key)`.
        shape: of one input.
        kind: whether inputs are numbers with one label each, or tokens with a label each.
        classes: the number of labels, and of tokens.
    """

    model: Callable[..., eqx.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int
    examples: int = 4096
    kind: Literal["numbers", "tokens"] = "numbers"
    classes: int = 10

    def arrays(self) -> Batch:
        """Return `input` (float32 or int32) and `label` (int32), by chance."""
        rng = np.random.default_rng(0)
        if self.kind == "tokens":
            text = rng.integers(0, self.classes, (self.examples, *self.shape)).astype(np.int32)
            return {"input": text, "label": np.roll(text, -1, axis=1)}
        inputs = rng.normal(size=(self.examples, *self.shape)).astype(np.float32)
        return {
            "input": inputs,
            "label": rng.integers(0, self.classes, self.examples).astype(np.int32),
        }


WORKLOADS = {
    "mlp_small": Workload(partial(eqx.nn.MLP, 64, 10, 128, 2), (64,), 64, steps=2000),
    "resnet48": Workload(partial(ResidualNetwork, 64, 32, 48), (64,), 8, steps=500),
    "mlp_784": Workload(partial(eqx.nn.MLP, 784, 10, 256, 1), (784,), 128, steps=400),
    "transformer": Workload(
        partial(Transformer, 512, 64, 320, 8, 5),
        (64,),
        4,
        steps=12,
        examples=256,
        kind="tokens",
        classes=512,
    ),
    "resnet18": Workload(partial(ResNet18, 32), (3, 32, 32), 8, steps=12, examples=256),
}


class Trained(fg.Module):
    """The model with the training contract."""

    model: Any

    def training_step(self, batch: Batch, ctx: fg.Context) -> fg.Output:
        loss, logits = compute_loss(self.model, batch)
        return fg.Output(
            loss, metrics={"accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"])}
        )

    def predict_step(self, batch: Batch, ctx: fg.Context) -> Array:
        return jax.vmap(self.model)(batch["input"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return OPTIMIZER


def compute_loss(model: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, "batch ..."]]:
    """Return the mean cross-entropy and the logits."""
    logits = jax.vmap(model)(batch["input"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def build_update(model: Any) -> tuple[Any, Callable[..., tuple[Any, Any, Array]]]:
    """Return the arrays of a model, and the step over them."""
    params, static = eqx.partition(model, eqx.is_array)

    def update(
        params: Any, opt_state: Any, key: Any, i: Any, batch: Batch
    ) -> tuple[Any, Any, Array]:
        def loss(params: Any) -> Any:
            return compute_loss(eqx.combine(params, static), batch)

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return params, update


def iterate_batches(workload: Workload, arrays: Batch, shuffle: bool) -> Iterator[Batch]:
    """Yield epoch after epoch, permuted and gathered as `fg.ArrayData` does it."""
    for epoch in range(10**9):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([0, epoch])))
        order = (
            generator.permutation(workload.examples) if shuffle else np.arange(workload.examples)
        )
        for low in range(0, workload.examples, workload.batch_size):
            chosen = order[low : low + workload.batch_size]
            yield {name: array.take(chosen, 0) for name, array in arrays.items()}


def copy_arrays(tree: Any) -> Any:
    """Return a copy of every array, ready to be donated."""
    return jax.block_until_ready(
        jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, tree)
    )
