"""GPT-2, Llama, Qwen and ViT as Equinox models for Fulgurite."""

__tracebackhide__ = True

from fulgurite_models.attention import Cache as Cache, Rope as Rope
from fulgurite_models.generation import (
    Generated as Generated,
    Sampling as Sampling,
    generate as generate,
    make_generate_function as make_generate_function,
)
from fulgurite_models.gpt2 import GPT2 as GPT2, GPT2_FAMILY as GPT2_FAMILY, GPT2Config as GPT2Config
from fulgurite_models.language import LanguageModel as LanguageModel
from fulgurite_models.llama import (
    LLAMA_FAMILY as LLAMA_FAMILY,
    QWEN2_FAMILY as QWEN2_FAMILY,
    QWEN3_FAMILY as QWEN3_FAMILY,
    Llama as Llama,
    LlamaConfig as LlamaConfig,
)
from fulgurite_models.samples import TextSamples as TextSamples
from fulgurite_models.sharding import make_sharding_rules as make_sharding_rules
from fulgurite_models.training import (
    compute_logits as compute_logits,
    next_token_loss as next_token_loss,
)
from fulgurite_models.vit import VIT_FAMILY as VIT_FAMILY, ViT as ViT, ViTConfig as ViTConfig
