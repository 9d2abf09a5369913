"""Low-rank adapters for the linear layers of any Equinox model."""

__tracebackhide__ = True

from fulgurite_lora.adapters import (
    add_adapters as add_adapters,
    merge as merge,
    remove_adapters as remove_adapters,
    select_adapters as select_adapters,
    unmerge as unmerge,
    use_adapters as use_adapters,
)
from fulgurite_lora.layers import Adapter as Adapter, LoraLinear as LoraLinear
from fulgurite_lora.plugin import Lora as Lora
