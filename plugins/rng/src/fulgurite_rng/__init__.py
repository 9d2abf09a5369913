"""Named random streams for Fulgurite: `Engine(plugins=[Rng(Stream("noise", train=True, eval=True))])`."""

from fulgurite import Stream as Stream

from fulgurite_rng.plugin import DEFAULTS as DEFAULTS, Rng as Rng
