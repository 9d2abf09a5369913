"""What plugins are written with, beside `fulgurite` itself.

The names stand by subject. What is about metrics alone is in `fulgurite.metrics`.
"""
# ruff: noqa: I001 - by subject, not by module

# Hooks, and the plugins that implement them.
from fulgurite._src import hookspecs as hookspecs
from fulgurite._src.fit.run import EngineView as EngineView
from fulgurite._src.plugins.manager import PluginManager as PluginManager
from fulgurite._src.plugins.markers import Combine as Combine, find_hookspecs as find_hookspecs
from fulgurite._src.plugins.selection import (
    InstalledPlugin as InstalledPlugin,
    RegisteredPlugin as RegisteredPlugin,
    find_installed_plugins as find_installed_plugins,
    find_plugin as find_plugin,
)

# Triggers and the actions that they fire.
from fulgurite._src.fit.scheduler import (
    EPOCH_END_ACTION as EPOCH_END_ACTION,
    BoundAction as BoundAction,
)
from fulgurite._src.triggers import (
    Or as Or,
    UnboundedRange as UnboundedRange,
    as_trigger as as_trigger,
    is_exact as is_exact,
)

# Records, and the names and media in them.
from fulgurite._src.fit.records import (
    RecordDispatcher as RecordDispatcher,
    RecordKind as RecordKind,
)
from fulgurite._src.model.media import split_media as split_media
from fulgurite._src.record_names import (
    LEFT_OUT_MESSAGE as LEFT_OUT_MESSAGE,
    split_invalid_names as split_invalid_names,
)

# Evaluations, and decisions by a metric of a run.
from fulgurite._src.evaluation.batch_metrics import as_numbers as as_numbers
from fulgurite._src.evaluation.evaluator import (
    EvaluationResult as EvaluationResult,
    MetricFunctions as MetricFunctions,
)
from fulgurite._src.fit.monitor import (
    check_metric_exists as check_metric_exists,
    check_metric_measured as check_metric_measured,
    find_module_view as find_module_view,
    get_decision_stage as get_decision_stage,
    read_measured_metric as read_measured_metric,
)

# Batches.
from fulgurite._src.data.iterator import BatchIterator as BatchIterator
from fulgurite._src.data.leaves import as_arrays as as_arrays
from fulgurite._src.data.readers import BatchItem as BatchItem
from fulgurite._src.data.sources import get_split as get_split
from fulgurite._src.training.forward import count_examples as count_examples

# Modules: what they are made of, their losses, their random keys, what they sow.
from fulgurite._src.model.ambient_rng import provide_rngs as provide_rngs
from fulgurite._src.model.loss import scale_loss as scale_loss
from fulgurite._src.model.module import (
    apply_model as apply_model,
    get_loss_fns as get_loss_fns,
    get_method as get_method,
    prefix_output as prefix_output,
)
from fulgurite._src.model.sow import Sown as Sown, collect_sown as collect_sown
from fulgurite._src.rng import make_root_key as make_root_key
from fulgurite._src.training.forward import get_weight as get_weight
from fulgurite._src.training.state import as_model_init as as_model_init

# Update rules.
from fulgurite._src.model.module import as_optimizer_specs as as_optimizer_specs
from fulgurite._src.training.update import (
    Forward as Forward,
    apply_updates as apply_updates,
    call_optimizer as call_optimizer,
    zero_weightless_grads as zero_weightless_grads,
)
from fulgurite._src.tree.select import select_from_parts as select_from_parts

# Programs: the traced step, and its FLOPs.
from fulgurite._src.execution.flops import count_flops as count_flops
from fulgurite._src.execution.program import Program as Program
from fulgurite._src.training.step import TrainStep as TrainStep

# Trees: paths, leaves, shapes.
from fulgurite._src.model.module import is_floating_array as is_floating_array
from fulgurite._src.tree.paths import (
    TreePath as TreePath,
    describe_node as describe_node,
    is_array_like as is_array_like,
    leaves_with_paths as leaves_with_paths,
    map_to_paths as map_to_paths,
    parse_path as parse_path,
    path_from_keys as path_from_keys,
    resolve_path as resolve_path,
)
from fulgurite._src.tree.select import PathPattern as PathPattern
from fulgurite._src.tree.specs import (
    copy_arrays as copy_arrays,
    format_tree as format_tree,
    hash_tree as hash_tree,
    is_real_dtype as is_real_dtype,
    shape_spec as shape_spec,
    shape_summary as shape_summary,
    total_size as total_size,
    tree_signature as tree_signature,
)

# Sharding, and waiting for other processes.
from fulgurite._src.sharding import (
    FIT_START as FIT_START,
    SINGLE_PROCESS as SINGLE_PROCESS,
    ProcessShard as ProcessShard,
)
from fulgurite._src.waits import Wait as Wait, WaitAbandoned as WaitAbandoned

# Snapshots and checkpoints.
from fulgurite._src.fit.snapshot import (
    SHARED_HOST_STATE as SHARED_HOST_STATE,
    CheckpointSource as CheckpointSource,
)
from fulgurite._src.training.state import check_not_consumed as check_not_consumed

# Redaction: `***` in the place of secrets.
from fulgurite._src.redact import (
    REDACTED as REDACTED,
    RedactedText as RedactedText,
    format_error as format_error,
    is_secret_name as is_secret_name,
    redact_registered as redact_registered,
    redact_registered_value as redact_registered_value,
    redact_shapes as redact_shapes,
    redact_text as redact_text,
    redact_value as redact_value,
    register_secret as register_secret,
)

# What users read: messages, hints and short tracebacks.
from fulgurite._src.foreign_names import (
    hint_at_arguments as hint_at_arguments,
    hint_at_class_arguments as hint_at_class_arguments,
)
from fulgurite._src.printable import as_printable as as_printable
from fulgurite._src.tracebacks import (
    HIDDEN_FRAMES_NOTE as HIDDEN_FRAMES_NOTE,
    TRACEBACK_VARIABLE as TRACEBACK_VARIABLE,
    has_user_frames as has_user_frames,
    hide_constructor_frames as hide_constructor_frames,
    hide_internal_frames as hide_internal_frames,
)
