"""What plugins are written with, beside `fulgurite` itself.

The names stand by subject. What is about metrics alone is in `fulgurite.metrics`.
"""

from typing import TYPE_CHECKING

from fulgurite._src import hookspecs
from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.readers import BatchItem
from fulgurite._src.data.seekable import Seed, SeekableSource
from fulgurite._src.data.sources import get_device_arrays, get_split
from fulgurite._src.evaluation.batch_metrics import as_numbers
from fulgurite._src.evaluation.evaluation import EvaluationResult, MetricFunctions
from fulgurite._src.execution.flops import count_flops, count_model_flops
from fulgurite._src.execution.program import Program
from fulgurite._src.face_names import make_getattr
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.monitor import (
    check_metric_exists,
    check_metric_measured,
    find_module_view,
    get_decision_stage,
    read_measured_metric,
)
from fulgurite._src.fit.record_dispatcher import RecordDispatcher
from fulgurite._src.fit.records import RecordKind
from fulgurite._src.fit.scheduler import BoundAction
from fulgurite._src.fit.snapshot import SHARED_HOST_STATE, CheckpointSource, TrainingLength
from fulgurite._src.foreign_names import hint_at_arguments, hint_at_class_arguments
from fulgurite._src.model.ambient_rng import provide_rngs
from fulgurite._src.model.layers import is_layer, replace_layers, wrap_layer
from fulgurite._src.model.loss import scale_loss
from fulgurite._src.model.media import split_media
from fulgurite._src.model.module import (
    apply_model,
    as_optimizer_specs,
    get_loss_fns,
    get_method,
    is_floating_array,
    prefix_output,
)
from fulgurite._src.plugins.callers import HookCaller
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.markers import Combine, find_hookspecs
from fulgurite._src.plugins.plugin import Plugin, get_options
from fulgurite._src.plugins.selection import (
    InstalledPlugin,
    RegisteredPlugin,
    find_installed_plugins,
    find_plugin,
)
from fulgurite._src.printable import as_printable
from fulgurite._src.record_names import LEFT_OUT_MESSAGE, split_invalid_names
from fulgurite._src.redact import (
    REDACTED,
    RedactedText,
    format_error,
    is_secret_name,
    redact_registered,
    redact_registered_value,
    redact_shapes,
    redact_text,
    redact_value,
    register_secret,
)
from fulgurite._src.rng import make_root_key
from fulgurite._src.sharding import FIT_START, SINGLE_PROCESS, ProcessShard
from fulgurite._src.timing import Activity
from fulgurite._src.tracebacks import (
    HIDDEN_FRAMES_NOTE,
    TRACEBACK_VARIABLE,
    has_user_frames,
    hide_constructor_frames,
    hide_internal_frames,
)
from fulgurite._src.training.forward import count_examples, get_weight
from fulgurite._src.training.state import as_model_init, check_not_consumed
from fulgurite._src.training.step import TrainStep
from fulgurite._src.training.update import (
    Forward,
    apply_updates,
    call_optimizer,
    zero_weightless_grads,
)
from fulgurite._src.tree import path_grammar
from fulgurite._src.tree.paths import (
    TreePath,
    describe_node,
    find_wholes,
    is_array_like,
    leaves_with_paths,
    map_to_paths,
    parse_path,
    path_from_keys,
    resolve_path,
)
from fulgurite._src.tree.select import PathPattern, select_from_parts
from fulgurite._src.tree.specs import (
    copy_arrays,
    format_tree,
    hash_tree,
    is_real_dtype,
    shape_spec,
    shape_summary,
    total_size,
    tree_signature,
)
from fulgurite._src.triggers import Or, UnboundedRange, as_trigger, is_exact
from fulgurite._src.waits import Wait, WaitAbandoned

if not TYPE_CHECKING:  # or every name would be one
    __getattr__ = make_getattr(__name__)

__all__ = [  # noqa: RUF022 - by subject
    # Hooks, and the plugins that implement them.
    "Combine",
    "EngineView",
    "HookCaller",
    "InstalledPlugin",
    "Plugin",
    "PluginManager",
    "RegisteredPlugin",
    "find_hookspecs",
    "find_installed_plugins",
    "find_plugin",
    "get_options",
    "hookspecs",
    # Triggers and the actions that they fire.
    "BoundAction",
    "Or",
    "UnboundedRange",
    "as_trigger",
    "is_exact",
    # Records, and the names and media in them.
    "LEFT_OUT_MESSAGE",
    "RecordDispatcher",
    "RecordKind",
    "split_invalid_names",
    "split_media",
    # Evaluations, and decisions by a metric of a run.
    "EvaluationResult",
    "MetricFunctions",
    "as_numbers",
    "check_metric_exists",
    "check_metric_measured",
    "find_module_view",
    "get_decision_stage",
    "read_measured_metric",
    # Batches.
    "BatchItem",
    "BatchIterator",
    "Seed",
    "SeekableSource",
    "as_arrays",
    "count_examples",
    "get_device_arrays",
    "get_split",
    # Modules: what they are made of, their layers and losses, their random keys.
    "apply_model",
    "as_model_init",
    "get_loss_fns",
    "get_method",
    "get_weight",
    "is_layer",
    "make_root_key",
    "prefix_output",
    "provide_rngs",
    "replace_layers",
    "scale_loss",
    "wrap_layer",
    # Update rules.
    "Forward",
    "apply_updates",
    "as_optimizer_specs",
    "call_optimizer",
    "select_from_parts",
    "zero_weightless_grads",
    # Programs: the traced step, and its FLOPs.
    "Program",
    "TrainStep",
    "count_flops",
    "count_model_flops",
    "TrainingLength",
    # Trees: paths, leaves, shapes.
    "PathPattern",
    "TreePath",
    "copy_arrays",
    "describe_node",
    "find_wholes",
    "format_tree",
    "hash_tree",
    "is_array_like",
    "is_floating_array",
    "is_real_dtype",
    "leaves_with_paths",
    "map_to_paths",
    "parse_path",
    "path_from_keys",
    "path_grammar",
    "resolve_path",
    "shape_spec",
    "shape_summary",
    "total_size",
    "tree_signature",
    # What the program is doing, for displays.
    "Activity",
    # Sharding, and waiting for other processes.
    "FIT_START",
    "SINGLE_PROCESS",
    "ProcessShard",
    "Wait",
    "WaitAbandoned",
    # Snapshots and checkpoints.
    "SHARED_HOST_STATE",
    "CheckpointSource",
    "check_not_consumed",
    # Redaction: `***` in the place of secrets.
    "REDACTED",
    "RedactedText",
    "format_error",
    "is_secret_name",
    "redact_registered",
    "redact_registered_value",
    "redact_shapes",
    "redact_text",
    "redact_value",
    "register_secret",
    # What users read: messages, hints and short tracebacks.
    "HIDDEN_FRAMES_NOTE",
    "TRACEBACK_VARIABLE",
    "as_printable",
    "has_user_frames",
    "hide_constructor_frames",
    "hide_internal_frames",
    "hint_at_arguments",
    "hint_at_class_arguments",
]
