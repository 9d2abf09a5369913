"""GPT-2: learned positions, LayerNorm before each layer, GELU."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
from fulgurite.errors import set_ints
from fulgurite_pretrained import Family, Split
from jaxtyping import Array, Float, Integer, Key

from fulgurite_models.attention import MLP, Attention, Cache, apply_dropout, stack_blocks
from fulgurite_models.config import (
    check_divides,
    check_sizes,
    get_flag,
    get_number,
    get_rate,
    get_size,
    refuse_values,
)
from fulgurite_models.language import LanguageModel, look_up
from fulgurite_models.maps import map_arrays


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2.

    Example:
        from fulgurite_models import GPT2, GPT2Config

        config = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
        gpt2 = GPT2(config, key=jax.random.key(0))

    Attributes:
        vocab_size: the number of tokens.
        max_length: the number of positions.
        width: of the vectors of tokens.
        depth: the number of blocks.
        num_heads: of attention.
        hidden_width: of the MLP; four times `width` by default.
        norm_eps: of LayerNorm.
        dropout: of what each layer adds.
        embedding_dropout: of the vectors of tokens.
        attention_dropout: of the weights of attention.
        is_tied: whether the logits are made by the embedding.
    """

    vocab_size: int = 50257
    max_length: int = 1024
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    hidden_width: int | None = None
    norm_eps: float = 1e-5
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    is_tied: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "max_length", "width", "depth", "num_heads")
        check_divides(self, "num_heads", "width")
        set_ints(self, "hidden_width")
        if self.hidden_width == 4 * self.width:
            object.__setattr__(self, "hidden_width", None)  # equal to a config that leaves it out


class GPT2Block(eqx.Module):
    """Attention and an MLP, each after a norm."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: MLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPT2Config, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key)
        width = config.width
        self.attention_norm = eqx.nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = Attention(
            width, config.num_heads, dropout=config.attention_dropout, key=keys[0]
        )
        self.mlp_norm = eqx.nn.LayerNorm(width, eps=config.norm_eps)
        # GPT-2's GELU is the approximation by tanh.
        self.mlp = MLP(width, config.hidden_width or 4 * width, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "time width"], mask: Any, *, key: Any = None, **options: Any
    ) -> tuple[Float[Array, "time width"], Cache | None]:
        """Return what the next block gets, and the cache; arguments as for `Attention`."""
        keys = [None] * 4 if key is None else list(jax.random.split(key, 4))
        y = jax.vmap(self.attention_norm)(x)
        y, cache = self.attention(y, mask, key=keys[0], **options)
        x = x + apply_dropout(self.dropout, y, keys[1])
        y = self.mlp(jax.vmap(self.mlp_norm)(x), key=keys[2])
        return x + apply_dropout(self.dropout, y, keys[3]), cache


class GPT2(LanguageModel):
    """GPT-2.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    Example:
        from fulgurite_models import GPT2, GPT2Config

        config = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
        gpt2 = GPT2(config, key=jax.random.key(0))
        logits = jax.vmap(gpt2)(jnp.zeros((4, 8), int))  # (4, 8, 64)

    Attributes:
        embedding: of tokens.
        positions: of positions.
        blocks: a stack.
        norm: after the last block.
        head: makes the logits; None where the embedding does.
        dropout: of the vectors of tokens.
        config: the sizes.
    """

    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: GPT2Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear | None
    dropout: eqx.nn.Dropout
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        width = config.width
        tokens = 0.02 * jax.random.normal(keys[0], (config.vocab_size, width))
        positions = 0.02 * jax.random.normal(keys[1], (config.max_length, width))
        self.embedding = eqx.nn.Embedding(weight=tokens)
        self.positions = eqx.nn.Embedding(weight=positions)
        make_block = partial(_make_block, config)
        self.blocks = stack_blocks(make_block, config.depth, keys[2])
        self.norm = eqx.nn.LayerNorm(width, eps=config.norm_eps)
        self.head = None
        if not config.is_tied:
            self.head = eqx.nn.Linear(width, config.vocab_size, use_bias=False, key=keys[3])
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        self.config = config

    def embed(
        self, tokens: Integer[Array, " time"], positions: Integer[Array, " time"], key: Any
    ) -> Float[Array, "time width"]:
        """Return the vectors of tokens and positions, NaN for one that there is not."""
        x = look_up(self.embedding, tokens) + look_up(self.positions, positions)
        return apply_dropout(self.dropout, x, key)

    def get_max_length(self) -> int:
        """Return how many positions there are."""
        return self.config.max_length


def _make_block(config: GPT2Config, key: Key[Array, ""]) -> GPT2Block:
    return GPT2Block(config, key=key)


def _read_config(values: Mapping[str, Any]) -> GPT2Config:
    refuse_values(
        values,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    width = get_size(values, "n_embd", 768)
    return GPT2Config(
        vocab_size=get_size(values, "vocab_size", 50257),
        max_length=get_size(values, "n_positions", 1024),
        width=width,
        depth=get_size(values, "n_layer", 12),
        num_heads=get_size(values, "n_head", 12, divides=width),
        hidden_width=get_size(values, "n_inner", 4 * width),
        norm_eps=get_number(values, "layer_norm_epsilon", 1e-5),
        dropout=get_rate(values, "resid_pdrop", 0.1),
        embedding_dropout=get_rate(values, "embd_pdrop", 0.1),
        attention_dropout=get_rate(values, "attn_pdrop", 0.1),
        is_tied=get_flag(values, "tie_word_embeddings", True),
    )


def _write_config(config: GPT2Config) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.embedding_dropout,
        "layer_norm_epsilon": config.norm_eps,
        "n_embd": config.width,
        "n_head": config.num_heads,
        "n_inner": config.hidden_width,
        "n_layer": config.depth,
        "n_positions": config.max_length,
        "resid_pdrop": config.dropout,
        "tie_word_embeddings": config.is_tied,
        "vocab_size": config.vocab_size,
    }


def _make_map(config: GPT2Config) -> dict[str, Any]:
    """Return the map; the matrices of GPT-2's `Conv1D` are `(in, out)`."""
    start, block = "transformer.h.*", "blocks[*]"
    attention = f"{block}.attention"
    parts = ("query", "key", "value")
    path_map: dict[str, Any] = {
        "transformer.wte.weight": "embedding.weight",
        "transformer.wpe.weight": "positions.weight",
        f"{start}.attn.c_attn.weight": Split(*(f"{attention}.{part}.weight.T" for part in parts)),
        f"{start}.attn.c_attn.bias": Split(*(f"{attention}.{part}.bias" for part in parts)),
        # Masks, which older files have.
        f"{start}.attn.bias": None,
        f"{start}.attn.masked_bias": None,
        "lm_head.weight": "embedding.weight" if config.is_tied else "head.weight",
    }
    layers = {
        f"{start}.attn.c_proj": f"{attention}.output",
        f"{start}.mlp.c_fc": f"{block}.mlp.up",
        f"{start}.mlp.c_proj": f"{block}.mlp.down",
    }
    norms = {
        f"{start}.ln_1": f"{block}.attention_norm",
        f"{start}.ln_2": f"{block}.mlp_norm",
        "transformer.ln_f": "norm",
    }
    path_map |= map_arrays(layers, "weight", ".T") | map_arrays(norms, "weight")
    return path_map | map_arrays({**layers, **norms}, "bias")


GPT2_FAMILY = Family(
    model_type="gpt2",
    model=GPT2,
    architecture="GPT2LMHeadModel",
    read_config=_read_config,
    write_config=_write_config,
    make_map=_make_map,
    prefix="transformer.",
)
