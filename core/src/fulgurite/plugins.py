"""What plugins are written with, beside `fulgurite` itself: hooks, trees, records, update rules."""

from fulgurite._src import hookspecs
from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.readers import BatchItem
from fulgurite._src.data.sources import as_data, get_split
from fulgurite._src.evaluation.batch_metrics import as_numbers
from fulgurite._src.evaluation.evaluator import EvaluationResult, MetricFunctions
from fulgurite._src.execution.flops import count_flops
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.monitor import (
    check_metric_exists,
    check_metric_measured,
    find_module_view,
    get_decision_stage,
    read_measured_metric,
)
from fulgurite._src.fit.records import RecordDispatcher, RecordKind
from fulgurite._src.fit.run import EngineView
from fulgurite._src.fit.scheduler import EPOCH_END_ACTION, BoundAction
from fulgurite._src.fit.snapshot import SHARED_HOST_STATE, CheckpointSource
from fulgurite._src.foreign_names import hint_at_arguments, hint_at_class_arguments
from fulgurite._src.model.ambient_rng import provide_rngs
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
from fulgurite._src.model.sow import Sown, collect_sown
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
from fulgurite._src.record_names import LEFT_OUT_MESSAGE, split_by_name
from fulgurite._src.redact import (
    MASK,
    SECRET_NAME,
    RedactedText,
    format_error,
    is_secret_name,
    mask_registered,
    mask_value,
    redact_shapes,
    redact_text,
    redact_value,
    register_secret,
)
from fulgurite._src.rng import make_root_key
from fulgurite._src.sharding import FIT_START, SINGLE_PROCESS, ProcessShard
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
from fulgurite._src.training.update import Forward, apply_updates, call_optimizer, hide_weightless
from fulgurite._src.tree.paths import (
    TreePath,
    describe_node,
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
    is_array,
    is_real_dtype,
    shape_spec,
    shape_summary,
    total_size,
    tree_signature,
)
from fulgurite._src.triggers import Or, UnboundedRange, as_trigger, is_exact
from fulgurite._src.waits import Wait, WaitAbandoned

__all__ = [
    "EPOCH_END_ACTION",
    "FIT_START",
    "HIDDEN_FRAMES_NOTE",
    "LEFT_OUT_MESSAGE",
    "MASK",
    "SECRET_NAME",
    "SHARED_HOST_STATE",
    "SINGLE_PROCESS",
    "TRACEBACK_VARIABLE",
    "BatchItem",
    "BatchIterator",
    "BoundAction",
    "CheckpointSource",
    "Combine",
    "EngineView",
    "EvaluationResult",
    "Forward",
    "InstalledPlugin",
    "MetricFunctions",
    "Or",
    "PathPattern",
    "Plugin",
    "PluginManager",
    "ProcessShard",
    "Program",
    "RecordDispatcher",
    "RecordKind",
    "RedactedText",
    "RegisteredPlugin",
    "Sown",
    "TrainStep",
    "TreePath",
    "UnboundedRange",
    "Wait",
    "WaitAbandoned",
    "apply_model",
    "apply_updates",
    "as_arrays",
    "as_data",
    "as_model_init",
    "as_numbers",
    "as_optimizer_specs",
    "as_printable",
    "as_trigger",
    "call_optimizer",
    "check_metric_exists",
    "check_metric_measured",
    "check_not_consumed",
    "collect_sown",
    "copy_arrays",
    "count_examples",
    "count_flops",
    "describe_node",
    "find_hookspecs",
    "find_installed_plugins",
    "find_module_view",
    "find_plugin",
    "format_error",
    "format_tree",
    "get_decision_stage",
    "get_loss_fns",
    "get_method",
    "get_options",
    "get_split",
    "get_weight",
    "has_user_frames",
    "hash_tree",
    "hide_constructor_frames",
    "hide_internal_frames",
    "hide_weightless",
    "hint_at_arguments",
    "hint_at_class_arguments",
    "hookspecs",
    "is_array",
    "is_array_like",
    "is_exact",
    "is_floating_array",
    "is_real_dtype",
    "is_secret_name",
    "leaves_with_paths",
    "make_root_key",
    "map_to_paths",
    "mask_registered",
    "mask_value",
    "parse_path",
    "path_from_keys",
    "prefix_output",
    "provide_rngs",
    "read_measured_metric",
    "redact_shapes",
    "redact_text",
    "redact_value",
    "register_secret",
    "resolve_path",
    "scale_loss",
    "select_from_parts",
    "shape_spec",
    "shape_summary",
    "split_by_name",
    "split_media",
    "total_size",
    "tree_signature",
]
