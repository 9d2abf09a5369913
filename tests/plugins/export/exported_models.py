"""Models that tests export, each with a function of plain JAX that computes what it predicts."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 3, 11


class Regression(fg.Module):
    """A base with squared errors of what `forward` gives."""

    def forward(self, batch: Any, ctx: fg.Context) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((self.forward(batch, ctx) - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Perceptron(Regression):
    net: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.net = eqx.nn.MLP(4, 3, 16, 1, key=key)

    def forward(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(self.net)(batch["x"])

    def embed(self, batch: Any) -> Any:
        return jax.nn.relu(jax.vmap(self.net.layers[0])(batch["x"]))


class Normalized(fg.Module):
    """Has BatchNorm and dropout."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.linear = eqx.nn.Linear(4, 8, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(8, 3, key=keys[1])

    def apply(self, x: Any, state: Any, keys: Any) -> Any:
        def apply(x: Any, state: Any, key: Any) -> Any:
            hidden, state = self.norm(self.linear(x), state)
            return self.head(self.dropout(hidden, key=key)), state

        return jax.vmap(apply, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(
            x, state, keys
        )

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return self.apply(batch["x"], ctx.model_state, ctx.keys("default", batch["x"].shape[0]))[0]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        keys = ctx.keys("default", batch["x"].shape[0])
        preds, state = self.apply(batch["x"], ctx.model_state, keys)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Block(eqx.Module):
    """A causal attention layer with rotary positions, and a perceptron."""

    query_key_value: eqx.nn.Linear
    out: eqx.nn.Linear
    perceptron: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.query_key_value = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[2])

    def __call__(self, x: Any) -> Any:
        length = x.shape[0]
        parts = jnp.split(jax.vmap(self.query_key_value)(x), 3, axis=-1)
        query, key, value = (part.reshape(length, HEADS, -1) for part in parts)
        scores = jnp.einsum("qhd,khd->hqk", rotate(query), rotate(key)) / 8**0.5
        positions = jnp.arange(length)
        mask = positions[:, None] >= positions[None, :]
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        mixed = jnp.einsum("hqk,khd->qhd", weights, value).reshape(length, WIDTH)
        x = x + jax.vmap(self.out)(mixed)
        return x + jax.vmap(self.perceptron)(x)


def rotate(x: Any) -> Any:
    """Return heads (length, heads, size) with rotary position embeddings."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[0])[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [
            first * jnp.cos(angles) - second * jnp.sin(angles),
            second * jnp.cos(angles) + first * jnp.sin(angles),
        ],
        -1,
    )


class Transformer(fg.Module):
    """Stacked blocks under `jax.lax.scan`."""

    embedding: eqx.nn.Embedding
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[1], LAYERS))
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def apply(self, tokens: Any) -> Any:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def run_block(x: Any, block: Any) -> Any:
            return eqx.combine(block, static)(x), None

        x, _ = jax.lax.scan(run_block, jax.vmap(self.embedding)(tokens), arrays)
        return jax.vmap(self.head)(x)

    def apply_unrolled(self, tokens: Any) -> Any:
        """The same without a scan."""
        x = jax.vmap(self.embedding)(tokens)
        for index in range(LAYERS):
            block = jax.tree.map(
                lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, self.blocks
            )
            x = block(x)
        return jax.vmap(self.head)(x)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(self.apply)(batch["tokens"])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self.apply)(batch["tokens"])[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return fg.Output(losses.mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Ensemble(Regression):
    """Members of one class in one module, whose predictions are averaged."""

    members: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        def make(key: Any) -> eqx.nn.MLP:
            return eqx.nn.MLP(4, 3, 8, 1, key=key)

        self.members = eqx.filter_vmap(make)(jax.random.split(key, 5))

    def forward(self, batch: Any, ctx: fg.Context) -> Any:
        def predict(member: Any, x: Any) -> Any:
            return jax.vmap(member)(x)

        each = eqx.filter_vmap(predict, in_axes=(eqx.if_array(0), None))(self.members, batch["x"])
        return each.mean(0)
