"""Loaders of other libraries as data sources; `docs/loaders.md` is the guide."""

from fulgurite_data.adapters.grain_datasets import from_grain
from fulgurite_data.adapters.huggingface import HuggingFace, from_huggingface
from fulgurite_data.adapters.tensorflow_datasets import from_tfdata
from fulgurite_data.adapters.torch_loaders import from_torch

__all__ = ["HuggingFace", "from_grain", "from_huggingface", "from_tfdata", "from_torch"]
