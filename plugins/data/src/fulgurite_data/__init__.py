"""Several data sources in one batch, or one after the other; `docs/sources-and-stages.md` is the
guide."""

__tracebackhide__ = True

from fulgurite_data.adapters import from_grain, from_huggingface, from_tfdata, from_torch
from fulgurite_data.stages import Stages
from fulgurite_data.text import TextFiles, Tokenizer, tokenize
from fulgurite_data.together import Together

__all__ = [
    "Stages",
    "TextFiles",
    "Together",
    "Tokenizer",
    "from_grain",
    "from_huggingface",
    "from_tfdata",
    "from_torch",
    "tokenize",
]
