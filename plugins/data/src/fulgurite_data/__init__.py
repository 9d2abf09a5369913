"""Pipelines from files to batches, and several data sources in one; `docs/data.md` and
`docs/sources-and-stages.md` are the guides."""

__tracebackhide__ = True

from fulgurite_data.attention import make_attention_mask
from fulgurite_data.batches import Batches
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
from fulgurite_data.together import Together
from fulgurite_data.tokens import write_tokens

__all__ = [
    "ArrayRecords",
    "Arrays",
    "Batches",
    "Dataset",
    "Images",
    "Items",
    "JSONLines",
    "MapOnDevice",
    "Parquet",
    "Ragged",
    "Stages",
    "Statistics",
    "Together",
    "Tokens",
    "compute_statistics",
    "make_attention_mask",
    "mix",
    "write_tokens",
    "zip_datasets",
]
