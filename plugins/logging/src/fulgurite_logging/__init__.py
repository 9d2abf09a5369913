"""Write the records of Fulgurite as JSON lines, CSV and console lines, and record more.

Each record of the exact stream is written exactly once, also by a run that is resumed.
"""

__tracebackhide__ = True

from fulgurite_logging.batch_pictures import BatchPictures as BatchPictures
from fulgurite_logging.compilations import CompilationMonitor as CompilationMonitor
from fulgurite_logging.console import (
    ConsoleLogger as ConsoleLogger,
    PythonLogger as PythonLogger,
)
from fulgurite_logging.environment import EnvironmentLogger as EnvironmentLogger
from fulgurite_logging.file_logger import FileLogger as FileLogger
from fulgurite_logging.files import LONGEST_LINE as LONGEST_LINE
from fulgurite_logging.jsonl import (
    JSONLBackend as JSONLBackend,
    JSONLLogger as JSONLLogger,
)
from fulgurite_logging.loop_logger import LoopLogger as LoopLogger
from fulgurite_logging.media_logger import MediaLogger as MediaLogger
from fulgurite_logging.norms import (
    LearningRateMonitor as LearningRateMonitor,
    NormMonitor as NormMonitor,
)
from fulgurite_logging.null import NullLogger as NullLogger
from fulgurite_logging.reading import (
    iter_records as iter_records,
    iter_telemetry as iter_telemetry,
)
from fulgurite_logging.table import CSVLogger as CSVLogger
from fulgurite_logging.writer import (
    BackgroundWriter as BackgroundWriter,
    LogBackend as LogBackend,
)
