"""Run directories of Fulgurite: their layout, who may write there, and JSON without loss."""

__tracebackhide__ = True

from fulgurite_runs.beginning import find_beginning
from fulgurite_runs.directory import (
    EvaluationDirectory,
    RunDirectory,
    check_in_place,
    expand_path,
    get_folder,
    hash_commit,
    is_link,
    list_superseded,
    supersede,
    sync_folder,
)
from fulgurite_runs.hyperparameters import (
    describe_origins,
    get_hyperparameters,
    get_program_hyperparameters,
    takes_program,
)
from fulgurite_runs.json_codec import (
    MAX_MEMORY as MAX_JSON_MEMORY,
    MAX_SIZE as MAX_JSON_SIZE,
    as_float,
    check_memory as check_json_memory,
    check_readable,
    dumps,
    encode_readable,
    estimate_memory as estimate_json_memory,
    loads,
)
from fulgurite_runs.lock import InUseError, Lock, Owner, read_owner
from fulgurite_runs.loggers import flush_loggers, rewind_loggers
from fulgurite_runs.manifest import (
    SETTINGS as MANIFEST_SETTINGS,
    describe_model,
    describe_plugins,
    get_arguments,
)
from fulgurite_runs.opening import RunPlugin, get_run_directory, open_run
from fulgurite_runs.origin import make_origin, read_origin, write_origin
from fulgurite_runs.program import describe_program, format_commit, format_program
from fulgurite_runs.replacing import replace_file
from fulgurite_runs.waiting import call_abandonable, start_thread

__all__ = [  # noqa: RUF022 - by subject
    # The directory of a run, and plugins that write there.
    "EvaluationDirectory",
    "RunDirectory",
    "RunPlugin",
    "find_beginning",
    "get_run_directory",
    "open_run",
    # Where a run comes from that began in the middle of another one.
    "make_origin",
    "read_origin",
    "write_origin",
    # Who writes.
    "InUseError",
    "Lock",
    "Owner",
    "read_owner",
    # JSON without loss, of a size that can be read again.
    "MAX_JSON_MEMORY",
    "MAX_JSON_SIZE",
    "as_float",
    "check_json_memory",
    "check_readable",
    "dumps",
    "encode_readable",
    "estimate_json_memory",
    "loads",
    # What a manifest says: model, plugins, program, hyperparameters.
    "MANIFEST_SETTINGS",
    "describe_model",
    "describe_origins",
    "describe_plugins",
    "describe_program",
    "format_commit",
    "format_program",
    "get_arguments",
    "get_hyperparameters",
    "get_program_hyperparameters",
    "takes_program",
    # Loggers: make their records durable, drop those after a position.
    "flush_loggers",
    "rewind_loggers",
    # Files, links and folders.
    "check_in_place",
    "expand_path",
    "get_folder",
    "hash_commit",
    "is_link",
    "list_superseded",
    "replace_file",
    "supersede",
    "sync_folder",
    # Threads that a disk that hangs does not stop.
    "call_abandonable",
    "start_thread",
]
