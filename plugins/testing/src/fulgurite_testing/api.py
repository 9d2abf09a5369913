"""The public names."""

from fulgurite_testing.bits import (
    arrays as arrays,
    assert_same_bits as assert_same_bits,
    same_bits as same_bits,
)
from fulgurite_testing.check import (
    CHECKS as CHECKS,
    PluginFailure as PluginFailure,
    check_plugin as check_plugin,
)
from fulgurite_testing.events import Event as Event, Events as Events
from fulgurite_testing.memory import Memory as Memory
from fulgurite_testing.tiny import (
    TinyModel as TinyModel,
    tiny_data as tiny_data,
    tiny_engine as tiny_engine,
)
