"""Named random streams for Fulgurite: `Engine(plugins=[Rng(RngStream("noise",
eval=True))])`."""

__tracebackhide__ = True

from fulgurite import RngStream as RngStream

from fulgurite_rng.layers import Dropout as Dropout
from fulgurite_rng.plugin import DEFAULTS as DEFAULTS, Rng as Rng, rng_context as rng_context
