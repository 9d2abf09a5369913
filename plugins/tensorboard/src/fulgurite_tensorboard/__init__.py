"""Write records of Fulgurite for TensorBoard: `Engine(plugins=["tensorboard"], run_dir=...)`."""

__tracebackhide__ = True

from fulgurite_tensorboard.events import EventFile as EventFile, read_events as read_events
from fulgurite_tensorboard.plugin import TensorBoardLogger as TensorBoardLogger
from fulgurite_tensorboard.scalar_writer import TensorBoardWriter as TensorBoardWriter
