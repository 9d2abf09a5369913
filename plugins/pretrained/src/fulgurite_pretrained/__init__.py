"""Weights of others for Fulgurite: safetensors by path maps, and folders of Hugging Face."""

__tracebackhide__ = True

from fulgurite_pretrained.families import Family as Family
from fulgurite_pretrained.folders import (
    find_folder as find_folder,
    from_pretrained as from_pretrained,
    load_config as load_config,
    save_pretrained as save_pretrained,
)
from fulgurite_pretrained.naming import Split as Split
from fulgurite_pretrained.plugin import Pretrained as Pretrained
from fulgurite_pretrained.reading import load_safetensors as load_safetensors
from fulgurite_pretrained.writing import save_safetensors as save_safetensors
