"""Pipelines from files to batches, and several data sources in one; `docs/data.md` and
`docs/sources-and-stages.md` are the guides."""

__tracebackhide__ = True

from fulgurite_data.adapters import (
    HuggingFace,
    from_grain,
    from_huggingface,
    from_tfdata,
    from_torch,
)
from fulgurite_data.attention import make_attention_mask
from fulgurite_data.batches import Batches
from fulgurite_data.datamodule import DataModule
from fulgurite_data.dataset import Dataset
from fulgurite_data.device import MapOnDevice
from fulgurite_data.examples import Ragged
from fulgurite_data.mixing import mix, zip_datasets
from fulgurite_data.normalizing import Statistics
from fulgurite_data.sources import (
    ArrayRecords,
    Arrays,
    Images,
    Items,
    JSONLines,
    Parquet,
    Tokens,
)
from fulgurite_data.stages import Stages
from fulgurite_data.statistics import compute_statistics
from fulgurite_data.text import TextFiles, tokenize
from fulgurite_data.together import Together
from fulgurite_data.tokens import write_tokens

__all__ = [
    "ArrayRecords",
    "Arrays",
    "Batches",
    "DataModule",
    "Dataset",
    "HuggingFace",
    "Images",
    "Items",
    "JSONLines",
    "MapOnDevice",
    "Parquet",
    "Ragged",
    "Stages",
    "Statistics",
    "TextFiles",
    "Together",
    "Tokens",
    "compute_statistics",
    "from_grain",
    "from_huggingface",
    "from_tfdata",
    "from_torch",
    "make_attention_mask",
    "mix",
    "tokenize",
    "write_tokens",
    "zip_datasets",
]
