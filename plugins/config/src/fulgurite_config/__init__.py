"""Configuration as data: calls to make later, that can be changed and written as JSON."""

__tracebackhide__ = True

from fulgurite_config.calls import L, load_targets
from fulgurite_config.codec import JSON_SOURCE, from_json, from_plain, to_json, to_plain
from fulgurite_config.comparison import (
    copy,
    copy_one_way,
    diff,
    iter_nodes_by_path,
    iter_values,
    merge,
)
from fulgurite_config.errors import (
    ConfigError,
    NotAllowedError,
    NotLoadedError,
    suggest as suggest_name,
)
from fulgurite_config.evaluation import Evaluation as ValueReader, say_where
from fulgurite_config.expressions import Lazy, apply, format_path, has_lazy
from fulgurite_config.formatting import format_item, format_value
from fulgurite_config.limits import Budget
from fulgurite_config.names import Name, get_name as get_public_name
from fulgurite_config.nodes import (
    Node,
    get_default as get_argument_default,
    get_state as get_node_state,
    is_constant,
    iter_children,
    iter_names as iter_argument_names,
    iter_nodes,
)
from fulgurite_config.numbers import parse_float
from fulgurite_config.overrides import (
    Change,
    apply_overrides,
    apply_values,
    check_types,
    get_annotation as get_argument_annotation,
)
from fulgurite_config.paths import normalize_path, split_override
from fulgurite_config.permissions import find_names as find_configured_names
from fulgurite_config.printing import to_python
from fulgurite_config.required import REQUIRED, Required
from fulgurite_config.resolution import resolve
from fulgurite_config.sweeps import Trial, expand_axes, split_axis, sweep
from fulgurite_config.values import (
    fit_value,
    flatten_union,
    format_type,
    is_known_type,
    read_value,
)

__all__ = [  # noqa: RUF022 - by subject
    # Write, change and read configurations.
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
    # What command lines are written with: nodes and their arguments,
    "check_types",
    "find_configured_names",
    "get_argument_annotation",
    "get_argument_default",
    "get_node_state",
    "get_public_name",
    "is_constant",
    "iter_argument_names",
    "iter_children",
    "iter_nodes",
    "iter_nodes_by_path",
    "suggest_name",
    # references and expressions,
    "Budget",
    "Lazy",
    "ValueReader",
    "has_lazy",
    "say_where",
    # and what is typed and printed.
    "JSON_SOURCE",
    "expand_axes",
    "fit_value",
    "flatten_union",
    "format_item",
    "format_path",
    "format_type",
    "format_value",
    "is_known_type",
    "normalize_path",
    "parse_float",
    "read_value",
    "split_axis",
    "split_override",
]
