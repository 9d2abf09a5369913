"""Configuration as data: calls to make later, that can be changed and written as JSON."""

__tracebackhide__ = True

from fulgurite_config.calls import L, load_targets
from fulgurite_config.codec import from_json, from_plain, to_json, to_plain
from fulgurite_config.comparison import copy, copy_one_way, diff, iter_values, merge
from fulgurite_config.errors import ConfigError, NotAllowedError, NotLoadedError
from fulgurite_config.expressions import apply
from fulgurite_config.names import Name
from fulgurite_config.nodes import Node
from fulgurite_config.overrides import Change, apply_overrides, apply_values
from fulgurite_config.printing import to_python
from fulgurite_config.required import REQUIRED, Required
from fulgurite_config.resolution import resolve
from fulgurite_config.sweeps import Trial, sweep

__all__ = [
    "REQUIRED",
    "Change",
    "ConfigError",
    "L",
    "Name",
    "Node",
    "NotAllowedError",
    "NotLoadedError",
    "Required",
    "Trial",
    "apply",
    "apply_overrides",
    "apply_values",
    "copy",
    "copy_one_way",
    "diff",
    "from_json",
    "from_plain",
    "iter_values",
    "load_targets",
    "merge",
    "resolve",
    "sweep",
    "to_json",
    "to_plain",
    "to_python",
]
