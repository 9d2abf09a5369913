"""The public names."""

from fulgurite_testing.check import (
    CHECKS as CHECKS,
    PluginFailure as PluginFailure,
    check_plugin as check_plugin,
)
from fulgurite_testing.compare import (
    assert_same_bits as assert_same_bits,
    find_difference as find_difference,
    get_arrays as get_arrays,
)
from fulgurite_testing.events import Event as Event, EventRecorder as EventRecorder
from fulgurite_testing.memory import InMemoryCheckpointer as InMemoryCheckpointer
from fulgurite_testing.source_check import (
    SourceFailure as SourceFailure,
    check_source as check_source,
)
from fulgurite_testing.tiny import (
    TinyModel as TinyModel,
    tiny_data as tiny_data,
    tiny_engine as tiny_engine,
)
