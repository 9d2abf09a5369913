"""Named random streams for Fulgurite: `Engine(plugins=[Rng(RngStream("noise", train=True,
eval=True))])`."""

from fulgurite import RngStream as RngStream

from fulgurite_rng.plugin import DEFAULTS as DEFAULTS, Rng as Rng
