# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-cli",
#     "fulgurite-sharding",
#     "jax",
#     "jaxtyping",
#     "numpy",
#     "optax",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-sharding = { path = "../plugins/sharding", editable = true }
# ///
"""A language model over bytes, trained on the source text of Python's standard library, on one
device or on many.

uv run examples/transformer.py                                  # installs it; on all devices
python examples/transformer.py layout=fsdp devices=8            # on eight simulated ones
python examples/transformer.py layout=both devices=8 width=256  # fully sharded and tensor parallel

The first takes a minute on two cores. `layout` is `data` (batches divided), `fsdp` (parameters and
optimizer state as well), `tensor` (attention heads and hidden units divided) or `both` of the last
two. The model does not depend on it.
"""

import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment, run
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, UInt8

try:
    from fulgurite_sharding import FSDP, DataParallel, Sharding, TensorParallel, bytes_per_device
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/transformer.py`, "
        "which installs what is listed at its top."
    ) from None

Batch = UInt8[Array, "batch length"]
Hidden = Float[Array, "time width"]

# Attention is divided by heads and the hidden layer by units; the products that come back add up
# over "model".
RULES = [
    ("blocks[*].attention.output.weight", P(None, "model")),
    ("blocks[*].attention.*.weight", P("model", None)),
    ("blocks[*].up.weight", P("model", None)),
    ("blocks[*].down.weight", P(None, "model")),
    ("head.weight", P("model", None)),
]


def make_linear(inputs: int, outputs: int, key: Key[Array, ""]) -> eqx.nn.Linear:
    return eqx.nn.Linear(inputs, outputs, use_bias=False, key=key)


class Attention(eqx.Module):
    """Causal attention with rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    rotary: eqx.nn.RotaryPositionalEmbedding
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        self.query, self.key, self.value, self.output = (
            make_linear(width, width, k) for k in jax.random.split(key, 4)
        )
        self.rotary = eqx.nn.RotaryPositionalEmbedding(width // heads)
        self.heads = heads

    def __call__(self, x: Hidden) -> Hidden:
        def split_heads(layer: eqx.nn.Linear) -> Float[Array, "time heads part"]:
            return jax.vmap(layer)(x).reshape(len(x), self.heads, -1)

        apply_rope = jax.vmap(self.rotary, in_axes=1, out_axes=1)
        query, key = apply_rope(split_heads(self.query)), apply_rope(split_heads(self.key))
        attended = jax.nn.dot_product_attention(query, key, split_heads(self.value), is_causal=True)
        return jax.vmap(self.output)(attended.reshape(x.shape))


class Block(eqx.Module):
    """Attention and a layer of hidden units, each after a norm and beside a residual connection."""

    norms: list[eqx.nn.RMSNorm]
    attention: Attention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        attention, up, down = jax.random.split(key, 3)
        self.norms = [eqx.nn.RMSNorm(width, use_bias=False), eqx.nn.RMSNorm(width, use_bias=False)]
        self.attention = Attention(width, heads, key=attention)
        self.up = make_linear(width, 4 * width, up)
        self.down = make_linear(4 * width, width, down)

    def __call__(self, x: Hidden) -> Hidden:
        x = x + self.attention(jax.vmap(self.norms[0])(x))
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(hidden)


class Transformer(fg.Module):
    """A model that predicts each byte of a text from those before it."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    lr: float = eqx.field(static=True)

    def __init__(
        self, width: int, blocks: int, heads: int, lr: float, *, key: Key[Array, ""]
    ) -> None:
        first, last, *keys = jax.random.split(key, blocks + 2)
        self.embedding = eqx.nn.Embedding(weight=0.02 * jax.random.normal(first, (256, width)))
        self.blocks = [Block(width, heads, key=k) for k in keys]
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = make_linear(width, 256, last)
        self.lr = lr

    def __call__(self, text: Int[Array, " time"]) -> Float[Array, "time 256"]:
        x = jax.vmap(self.embedding)(text)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    def training_step(self, batch: Batch, ctx: fg.Context) -> fg.Output:
        text = batch.astype(jnp.int32)
        logits = jax.vmap(self)(text[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()
        return fg.Output(loss, metrics={"bits_per_byte": loss / jnp.log(2.0)})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(self.lr)


@dataclass(frozen=True)
class Report:
    """A plugin that prints the size of the state, a line at every log step, and bits per byte on
    other text."""

    test: fg.ArrayData
    tokens: int

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        parameters = bytes_per_device(run.state.module)
        optimizer = bytes_per_device(run.state.opt_state)
        print(
            f"{jax.device_count()} devices, each with {parameters:,} bytes of parameters "
            f"and {optimizer:,} of Adam's"
        )

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if "bits_per_byte" in record.values:
            print(
                f"step {record.step:5}  bits per byte {record.values['bits_per_byte']:.3f}",
                flush=True,
            )
        elif "steps_per_second" in record.values:
            tokens_per_second = self.tokens * record.values["steps_per_second"]
            print(f"step {record.step:5}  tokens per second {tokens_per_second:,.0f}")

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        metrics = run.engine.evaluate(result, self.test)
        print(f"other text: bits per byte {metrics['bits_per_byte']:.3f}")


def load_standard_library(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source text of Python's own modules in pieces of `length` bytes, to train on and
    to test on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    pieces: UInt8[np.ndarray, "pieces length"] = text[: len(text) // length * length].reshape(
        -1, length
    )
    pieces = pieces[np.random.default_rng(0).permutation(len(pieces))]
    return pieces[:-256], pieces[-256:]


def experiment(
    layout: Literal["data", "fsdp", "tensor", "both"] = "data",
    devices: int = 0,
    width: int = 128,
    blocks: int = 2,
    heads: int = 4,
    context: int = 64,
    batch_size: int = 32,
    lr: float = 2e-3,
    steps: int = 300,
    seed: int = 0,
) -> Experiment:
    """Train a transformer on the standard library; `devices` simulates that many on the CPU."""
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    size = min(4, heads)
    layouts: dict[str, Sharding] = {
        "data": DataParallel(),
        "fsdp": FSDP(min_size=2**12),
        "tensor": TensorParallel(RULES, size),
        "both": FSDP(min_size=2**12, mesh={"data": -1, "model": size}, rules=RULES),
    }
    train, test = load_standard_library(context + 1)
    report = Report(fg.ArrayData(test, batch_size), tokens=batch_size * context)
    engine = fg.Engine(steps=steps, seed=seed, log_every=50, plugins=[layouts[layout], report])
    return Experiment(
        engine=engine,
        model=partial(Transformer, width, blocks, heads, lr),
        data=fg.ArrayData(train, batch_size, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    run(experiment)
