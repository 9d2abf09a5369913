"""Records of Fulgurite as JSON lines, CSV and console lines, each exactly once; and plugins that record more."""

from fulgurite_logging.compilations import Compilations as Compilations
from fulgurite_logging.console import Console as Console
from fulgurite_logging.environment import Environment as Environment
from fulgurite_logging.jsonl import JsonLines as JsonLines
from fulgurite_logging.norms import LearningRate as LearningRate, Norms as Norms
from fulgurite_logging.show import Media as Media
from fulgurite_logging.table import Csv as Csv
