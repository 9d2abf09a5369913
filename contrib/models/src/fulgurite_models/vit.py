"""ViT: an image as patches, a token for its class."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError, set_ints
from fulgurite_pretrained import Family
from jaxtyping import Array, Float, Key

from fulgurite_models.attention import (
    MLP,
    Attention,
    apply_dropout,
    scan_blocks,
    stack_blocks,
)
from fulgurite_models.config import (
    check_divides,
    check_sizes,
    get_flag,
    get_number,
    get_rate,
    get_size,
    refuse_values,
)
from fulgurite_models.maps import map_arrays


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a ViT.

    Example:
        from fulgurite_models import ViT, ViTConfig

        config = ViTConfig(
            labels=("cat", "dog"), image_size=8, patch_size=4, width=16, depth=2, num_heads=2
        )
        vit = ViT(config, key=jax.random.key(0))

    Attributes:
        labels: the names of the classes.
        image_size: the height and width of an image.
        patch_size: the height and width of a patch, which divides those.
        num_channels: of an image.
        width: of the vectors of patches.
        depth: the number of blocks.
        num_heads: of attention.
        hidden_width: of the MLP; four times `width` by default.
        norm_eps: of LayerNorm.
        use_qkv_bias: of queries, keys and values.
        dropout: of what each layer adds, and of the vectors of patches.
        attention_dropout: of the weights of attention.
    """

    labels: tuple[str, ...]
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    hidden_width: int | None = None
    norm_eps: float = 1e-12
    use_qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))
        check_sizes(self, "image_size", "patch_size", "num_channels", "width", "depth", "num_heads")
        check_divides(self, "patch_size", "image_size")
        check_divides(self, "num_heads", "width")
        set_ints(self, "hidden_width")
        if self.hidden_width == 4 * self.width:
            object.__setattr__(self, "hidden_width", None)  # equal to a config that leaves it out


class Patches(eqx.Module):
    """The vectors of the patches of an image, with that of the class before them.

    Attributes:
        weight: of a patch, `(width, channels, patch, patch)`.
        bias: `(width,)`.
        label: the vector of the class, `(1, 1, width)`, as the files have it.
        positions: `(1, 1 + patches, width)`.
        size: the height and width of an image.
    """

    weight: Float[Array, "width channels patch patch"]
    bias: Float[Array, " width"]
    label: Float[Array, "1 1 width"]
    positions: Float[Array, "1 slots width"]
    size: int = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        shape = (config.width, config.num_channels, config.patch_size, config.patch_size)
        self.weight = jax.random.normal(keys[0], shape) / math.sqrt(math.prod(shape[1:]))
        self.bias = jnp.zeros(config.width)
        num_patches = (config.image_size // config.patch_size) ** 2
        self.label = 0.02 * jax.random.normal(keys[1], (1, 1, config.width))
        positions = jax.random.normal(keys[2], (1, 1 + num_patches, config.width))
        self.positions = 0.02 * positions
        self.size = config.image_size

    def __call__(self, image: Float[Array, "channels height width"]) -> Float[Array, "slots size"]:
        """Return the vectors; an image of another size is an error."""
        width, channels, patch, _ = self.weight.shape
        if image.shape != (channels, self.size, self.size):
            raise ModelError(
                f"ViT takes an image of the shape {(channels, self.size, self.size)}, channels "
                f"first, not {image.shape}"
            )
        num = self.size // patch
        grid = image.reshape(channels, num, patch, num, patch)
        pieces = grid.transpose(1, 3, 0, 2, 4).reshape(num * num, -1)
        vectors = pieces @ self.weight.reshape(width, -1).T + self.bias
        return jnp.concatenate([self.label[0], vectors]) + self.positions[0]


class ViTBlock(eqx.Module):
    """Attention and an MLP, each after a norm."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: MLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: ViTConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key)
        width = config.width
        self.attention_norm = eqx.nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = Attention(
            width,
            config.num_heads,
            use_bias=config.use_qkv_bias,
            dropout=config.attention_dropout,
            key=keys[0],
        )
        self.mlp_norm = eqx.nn.LayerNorm(width, eps=config.norm_eps)
        hidden_width = config.hidden_width or 4 * width
        self.mlp = MLP(width, hidden_width, _gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, x: Float[Array, "slots width"], key: Any) -> Float[Array, "slots width"]:
        """Return what the next block gets; `key` is for dropout, or None."""
        keys = [None] * 4 if key is None else list(jax.random.split(key, 4))
        y, _ = self.attention(jax.vmap(self.attention_norm)(x), None, key=keys[0])
        x = x + apply_dropout(self.dropout, y, keys[1])
        y = self.mlp(jax.vmap(self.mlp_norm)(x), key=keys[2])
        return x + apply_dropout(self.dropout, y, keys[3])


class ViT(eqx.Module):
    """A classifier of images.

    Source: Dosovitskiy et al. 2020, arXiv:2010.11929.

    Example:
        from fulgurite_models import ViT, ViTConfig

        config = ViTConfig(
            labels=("cat", "dog"), image_size=8, patch_size=4, width=16, depth=2, num_heads=2
        )
        vit = ViT(config, key=jax.random.key(0))
        logits = jax.vmap(vit)(jnp.zeros((4, 3, 8, 8)))  # (4, 2)

    Attributes:
        patches: makes vectors of an image.
        blocks: a stack.
        norm: after the last block.
        head: makes the logits of the vector of the class.
        dropout: of the vectors of patches.
        config: the sizes.
    """

    patches: Patches
    blocks: ViTBlock
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        self.patches = Patches(config, key=keys[0])
        make_block = partial(_make_block, config)
        self.blocks = stack_blocks(make_block, config.depth, keys[1])
        self.norm = eqx.nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = eqx.nn.Linear(config.width, len(config.labels), key=keys[2])
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.config = config

    def __call__(
        self, image: Float[Array, "channels height width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, " classes"]:
        """Return the logits of an image.

        Args:
            image: channels first.
            key: for dropout.
        """
        first_key, block_key = (None, None) if key is None else jax.random.split(key)

        def apply(block: Any, x: Any, _: Any, key: Any) -> tuple[Any, None]:
            return block(x, key), None

        x = apply_dropout(self.dropout, self.patches(image), first_key)
        x, _ = scan_blocks(self.blocks, apply, x, None, block_key)
        return self.head(self.norm(x[0]))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _make_block(config: ViTConfig, key: Key[Array, ""]) -> ViTBlock:
    return ViTBlock(config, key=key)


def _read_config(values: Mapping[str, Any]) -> ViTConfig:
    refuse_values(values, hidden_act=("gelu",))
    width = get_size(values, "hidden_size", 768)
    image_size = get_size(values, "image_size", 224)
    return ViTConfig(
        labels=_read_labels(values.get("id2label")),
        image_size=image_size,
        patch_size=get_size(values, "patch_size", 16, divides=image_size),
        num_channels=get_size(values, "num_channels", 3),
        width=width,
        depth=get_size(values, "num_hidden_layers", 12),
        num_heads=get_size(values, "num_attention_heads", 12, divides=width),
        hidden_width=get_size(values, "intermediate_size", 4 * width),
        norm_eps=get_number(values, "layer_norm_eps", 1e-12),
        use_qkv_bias=get_flag(values, "qkv_bias", True),
        dropout=get_rate(values, "hidden_dropout_prob", 0.0),
        attention_dropout=get_rate(values, "attention_probs_dropout_prob", 0.0),
    )


def _read_labels(labels: Any) -> tuple[str, ...]:
    """Return the names of the classes; without any there are two, as transformers has it."""
    if labels is None:
        return ("LABEL_0", "LABEL_1")
    if not isinstance(labels, Mapping) or labels.keys() != {str(n) for n in range(len(labels))}:
        raise ConfigurationError("id2label must have a name for each of the numbers from 0 on")
    return tuple(str(labels[str(number)]) for number in range(len(labels)))


def _write_config(config: ViTConfig) -> dict[str, Any]:
    return {
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "hidden_size": config.width,
        "id2label": {str(number): name for number, name in enumerate(config.labels)},
        "image_size": config.image_size,
        "intermediate_size": config.hidden_width or 4 * config.width,
        "label2id": {name: number for number, name in enumerate(config.labels)},
        "layer_norm_eps": config.norm_eps,
        "num_attention_heads": config.num_heads,
        "num_channels": config.num_channels,
        "num_hidden_layers": config.depth,
        "num_labels": len(config.labels),  # older files have it, and it must fit the labels
        "patch_size": config.patch_size,
        "qkv_bias": config.use_qkv_bias,
    }


def _make_map(config: ViTConfig) -> dict[str, Any]:
    start, block = "vit.encoder.layer.*", "blocks[*]"
    embeddings = "vit.embeddings"
    path_map: dict[str, Any] = {
        f"{embeddings}.cls_token": "patches.label",
        f"{embeddings}.position_embeddings": "patches.positions",
        f"{embeddings}.patch_embeddings.projection.weight": "patches.weight",
        f"{embeddings}.patch_embeddings.projection.bias": "patches.bias",
        # Of the model without a head.
        "vit.pooler.dense.weight": None,
        "vit.pooler.dense.bias": None,
    }
    layers = {
        f"{start}.attention.output.dense": f"{block}.attention.output",
        f"{start}.intermediate.dense": f"{block}.mlp.up",
        f"{start}.output.dense": f"{block}.mlp.down",
        f"{start}.layernorm_before": f"{block}.attention_norm",
        f"{start}.layernorm_after": f"{block}.mlp_norm",
        "vit.layernorm": "norm",
        "classifier": "head",
    }
    projections = {
        f"{start}.attention.attention.{part}": f"{block}.attention.{part}"
        for part in ("query", "key", "value")
    }
    path_map |= map_arrays(layers, "weight") | map_arrays(projections, "weight")
    path_map |= map_arrays(layers, "bias")
    return path_map | (map_arrays(projections, "bias") if config.use_qkv_bias else {})


VIT_FAMILY = Family(
    model_type="vit",
    model=ViT,
    architecture="ViTForImageClassification",
    read_config=_read_config,
    write_config=_write_config,
    make_map=_make_map,
    prefix="vit.",
)
