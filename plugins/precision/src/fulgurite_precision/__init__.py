"""Mixed precision for Fulgurite: dtypes of parameters, compute and outputs; loss scaling."""

__tracebackhide__ = True

from fulgurite_precision.precision import Precision as Precision
from fulgurite_precision.scaling import Dynamic as Dynamic, Static as Static
