"""The public names."""

from fulgurite_testing.bits import arrays as arrays
from fulgurite_testing.bits import assert_same_bits as assert_same_bits
from fulgurite_testing.bits import same_bits as same_bits
from fulgurite_testing.check import CHECKS as CHECKS
from fulgurite_testing.check import PluginFailure as PluginFailure
from fulgurite_testing.check import check_plugin as check_plugin
from fulgurite_testing.events import Event as Event
from fulgurite_testing.events import Events as Events
from fulgurite_testing.memory import Memory as Memory
from fulgurite_testing.tiny import TinyModel as TinyModel
from fulgurite_testing.tiny import tiny_data as tiny_data
from fulgurite_testing.tiny import tiny_engine as tiny_engine
