"""Llama and its kin, Qwen2 and Qwen3: RMSNorm, rotated positions, grouped heads, SwiGLU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
from fulgurite.errors import ConfigurationError, set_ints
from fulgurite_pretrained import Family
from jaxtyping import Array, Float, Integer, Key

from fulgurite_models.attention import MLP, Attention, Cache, Rope, stack_blocks
from fulgurite_models.config import (
    check_sizes,
    get_flag,
    get_number,
    get_rate,
    get_size,
    refuse_values,
)
from fulgurite_models.language import LanguageModel
from fulgurite_models.maps import map_arrays

_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""What each kind of rotation needs, under the names of transformers."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama, and how it differs from its kin.

    Example:
        from fulgurite_models import Llama, LlamaConfig

        config = LlamaConfig(
            vocab_size=64, width=16, depth=2, num_heads=4, num_kv_heads=2, hidden_width=32
        )
        llama = Llama(config, key=jax.random.key(0))

    Attributes:
        vocab_size: the number of tokens.
        width: of the vectors of tokens.
        depth: the number of blocks.
        num_heads: of queries.
        num_kv_heads: of keys and values, each for a group of queries.
        hidden_width: of the MLP.
        head_size: of a head; `width / num_heads` by default.
        max_length: for which the model was trained; it can be longer.
        norm_eps: of RMSNorm.
        rope: how positions turn queries and keys.
        use_qkv_bias: of queries, keys and values, as Qwen2 has it.
        use_output_bias: of the output of attention.
        use_mlp_bias: of the MLP.
        use_qk_norm: of the queries and keys of each head, as Qwen3 has it.
        attention_dropout: of the weights of attention.
        is_tied: whether the logits are made by the embedding.
        model_type: which of the kin it is, for the names in files.
    """

    vocab_size: int = 32000
    width: int = 4096
    depth: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    hidden_width: int = 11008
    head_size: int | None = None
    max_length: int = 2048
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    use_qkv_bias: bool = False
    use_output_bias: bool = False
    use_mlp_bias: bool = False
    use_qk_norm: bool = False
    attention_dropout: float = 0.0
    is_tied: bool = False
    model_type: Literal["llama", "qwen2", "qwen3"] = "llama"

    def __post_init__(self) -> None:
        check_sizes(
            self, "vocab_size", "width", "depth", "num_heads", "num_kv_heads", "hidden_width"
        )
        check_sizes(self, "max_length")
        set_ints(self, "head_size")
        if self.head_size == self.width // self.num_heads:
            object.__setattr__(self, "head_size", None)  # equal to a config that leaves it out
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} keys and values evenly"
            )
        if self.get_head_size() % 2:
            raise ConfigurationError(
                f"a head of {self.get_head_size()} numbers has no halves to turn"
            )

    def get_head_size(self) -> int:
        """Return the size of a head."""
        return self.head_size or self.width // self.num_heads


class LlamaBlock(eqx.Module):
    """Attention and a gated MLP, each after a norm."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    mlp_norm: eqx.nn.RMSNorm
    mlp: MLP

    def __init__(self, config: LlamaConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key)
        self.attention_norm = _make_norm(config)
        self.attention = Attention(
            config.width,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.get_head_size(),
            use_bias=config.use_qkv_bias,
            use_output_bias=config.use_output_bias,
            norm_eps=config.norm_eps if config.use_qk_norm else None,
            dropout=config.attention_dropout,
            key=keys[0],
        )
        self.mlp_norm = _make_norm(config)
        self.mlp = MLP(
            config.width,
            config.hidden_width,
            jax.nn.silu,
            is_gated=True,
            use_bias=config.use_mlp_bias,
            key=keys[1],
        )

    def __call__(
        self, x: Float[Array, "time width"], mask: Any, *, key: Any = None, **options: Any
    ) -> tuple[Float[Array, "time width"], Cache | None]:
        """Return what the next block gets, and the cache; arguments as for `Attention`."""
        keys = [None] * 2 if key is None else list(jax.random.split(key))
        y = jax.vmap(self.attention_norm)(x)
        y, cache = self.attention(y, mask, key=keys[0], **options)
        x = x + y
        return x + self.mlp(jax.vmap(self.mlp_norm)(x), key=keys[1]), cache


class Llama(LanguageModel):
    """Llama, Qwen2 or Qwen3.

    Source: Touvron et al. 2023, arXiv:2302.13971; Yang et al. 2024, arXiv:2407.10671.

    Example:
        from fulgurite_models import Llama, LlamaConfig

        config = LlamaConfig(
            vocab_size=64, width=16, depth=2, num_heads=4, num_kv_heads=2, hidden_width=32
        )
        llama = Llama(config, key=jax.random.key(0))
        logits = jax.vmap(llama)(jnp.zeros((4, 8), int))  # (4, 8, 64)

    Attributes:
        embedding: of tokens.
        blocks: a stack.
        norm: after the last block.
        head: makes the logits; None where the embedding does.
        config: the sizes.
    """

    embedding: eqx.nn.Embedding
    blocks: LlamaBlock
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        tokens = 0.02 * jax.random.normal(keys[0], (config.vocab_size, config.width))
        self.embedding = eqx.nn.Embedding(weight=tokens)
        make_block = partial(_make_block, config)
        self.blocks = stack_blocks(make_block, config.depth, keys[1])
        self.norm = _make_norm(config)
        self.head = None
        if not config.is_tied:
            size = config.vocab_size
            self.head = eqx.nn.Linear(config.width, size, use_bias=False, key=keys[2])
        self.config = config

    def make_rotation(self, positions: Integer[Array, " time"]) -> Any:
        """Return how positions turn queries and keys."""
        return self.config.rope.make_rotation(positions, self.config.get_head_size())


def _make_norm(config: LlamaConfig) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(config.width, eps=config.norm_eps, use_bias=False)


def _make_block(config: LlamaConfig, key: Key[Array, ""]) -> LlamaBlock:
    return LlamaBlock(config, key=key)


def _read_config(
    model_type: Literal["llama", "qwen2", "qwen3"], values: Mapping[str, Any]
) -> LlamaConfig:
    refuse_values(
        values, hidden_act=("silu",), use_sliding_window=(False,), partial_rotary_factor=(1.0,)
    )
    if any(kind != "full_attention" for kind in values.get("layer_types") or ()):
        raise ConfigurationError("layer_types has layers whose attention is not full_attention")
    width = get_size(values, "hidden_size")
    num_heads = get_size(values, "num_attention_heads")
    has_head_size = values.get("head_dim") is not None
    # Qwen3 has another default than the rest.
    default_size = 128 if model_type == "qwen3" else max(1, width // num_heads)
    use_bias = get_flag(values, "attention_bias", False)
    return LlamaConfig(
        vocab_size=get_size(values, "vocab_size"),
        width=width,
        depth=get_size(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=get_size(values, "num_key_value_heads", num_heads, divides=num_heads),
        hidden_width=get_size(values, "intermediate_size"),
        head_size=get_size(values, "head_dim") if has_head_size else default_size,
        max_length=get_size(values, "max_position_embeddings", 2048),
        norm_eps=get_number(values, "rms_norm_eps", 1e-6),
        rope=_read_rope(values),
        use_qkv_bias=True if model_type == "qwen2" else use_bias,
        use_output_bias=False if model_type == "qwen2" else use_bias,
        use_mlp_bias=get_flag(values, "mlp_bias", False),
        use_qk_norm=model_type == "qwen3",
        attention_dropout=get_rate(values, "attention_dropout", 0.0),
        is_tied=get_flag(values, "tie_word_embeddings", False),
        model_type=model_type,
    )


def _read_rope(values: Mapping[str, Any]) -> Rope:
    """Return how positions are turned, which transformers 5 and earlier ones write in two ways; of
    both, transformers takes the older one."""
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigurationError(f"rope_parameters is {parameters!r:.100}, not an object of JSON")
    source = parameters if "rope_theta" in parameters else values
    refuse_values(parameters, partial_rotary_factor=(1.0,))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str):
        raise ConfigurationError(f"rope_type is {kind!r:.100}; it must be a string")
    for name in _ROPE_NUMBERS.get(kind, ()):
        if parameters.get(name) is None:
            raise ConfigurationError(f"the rotation of positions {kind!r} has no {name}")
    default = Rope()
    return Rope(
        theta=get_number(source, "rope_theta", default.theta),
        kind=kind,  # pyright: ignore[reportArgumentType]
        factor=get_number(parameters, "factor", default.factor),
        low=get_number(parameters, "low_freq_factor", default.low),
        high=get_number(parameters, "high_freq_factor", default.high),
        length=get_size(parameters, "original_max_position_embeddings", default.length),
    )


def _write_config(config: LlamaConfig) -> dict[str, Any]:
    rope = _write_rope(config.rope)
    values = {
        "attention_dropout": config.attention_dropout,
        "head_dim": config.get_head_size(),
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        # What transformers 4 reads, and 5 prefers to the above where it is there.
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.is_tied,
        "vocab_size": config.vocab_size,
    }
    if config.model_type != "qwen2":
        values["attention_bias"] = config.use_qkv_bias
    if config.model_type == "llama":
        values["mlp_bias"] = config.use_mlp_bias
    else:
        values["layer_types"] = ["full_attention"] * config.depth
    _check_is_said(config, values)
    return values


def _check_is_said(config: LlamaConfig, values: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError for a layer that the config.json of a model cannot name: another
    program would leave it out.

    Args:
        config: of the model.
        values: of its config.json.
    """
    said = _read_config(config.model_type, values)
    for name in ("use_qkv_bias", "use_output_bias", "use_mlp_bias", "use_qk_norm"):
        if getattr(said, name) != getattr(config, name):
            raise ConfigurationError(
                f"{name} is {getattr(config, name)}, which the config.json of a "
                f"{config.model_type} cannot say: give another model_type, or write the model by "
                "save_safetensors"
            )


def _write_rope(rope: Rope) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind == "llama3":
        values["low_freq_factor"] = rope.low
        values["high_freq_factor"] = rope.high
        values["original_max_position_embeddings"] = rope.length
    return values


def _make_map(config: LlamaConfig) -> dict[str, Any]:
    start, block = "model.layers.*", "blocks[*]"
    attention = f"{start}.self_attn"
    parts = {"q": "query", "k": "key", "v": "value"}
    projections = {
        f"{attention}.{name}_proj": f"{block}.attention.{path}" for name, path in parts.items()
    }
    output = {f"{attention}.o_proj": f"{block}.attention.output"}
    mlp = {f"{start}.mlp.{part}_proj": f"{block}.mlp.{part}" for part in ("gate", "up", "down")}
    norms = {
        f"{start}.input_layernorm": f"{block}.attention_norm",
        f"{start}.post_attention_layernorm": f"{block}.mlp_norm",
        "model.norm": "norm",
    }
    if config.use_qk_norm:
        norms[f"{attention}.q_norm"] = f"{block}.attention.query_norm"
        norms[f"{attention}.k_norm"] = f"{block}.attention.key_norm"
    path_map: dict[str, Any] = {
        "model.embed_tokens.weight": "embedding.weight",
        # Wave lengths, which older files have.
        f"{attention}.rotary_emb.inv_freq": None,
        "lm_head.weight": "embedding.weight" if config.is_tied else "head.weight",
    }
    path_map |= map_arrays({**projections, **output, **mlp, **norms}, "weight")
    if config.use_qkv_bias:
        path_map |= map_arrays(projections, "bias")
    if config.use_output_bias:
        path_map |= map_arrays(output, "bias")
    if config.use_mlp_bias:
        path_map |= map_arrays(mlp, "bias")
    return path_map


def _make_family(model_type: Literal["llama", "qwen2", "qwen3"], architecture: str) -> Family:
    return Family(
        model_type=model_type,
        model=Llama,
        architecture=architecture,
        read_config=partial(_read_config, model_type),
        write_config=_write_config,
        make_map=_make_map,
        prefix="model.",
    )


LLAMA_FAMILY = _make_family("llama", "LlamaForCausalLM")
QWEN2_FAMILY = _make_family("qwen2", "Qwen2ForCausalLM")
QWEN3_FAMILY = _make_family("qwen3", "Qwen3ForCausalLM")
