"""Send records of Fulgurite to Weights & Biases: `Engine(plugins=[WandbLogger("digits")])`."""

__tracebackhide__ = True

from fulgurite_wandb.plugin import WandbLogger as WandbLogger
from fulgurite_wandb.runfile import read_run as read_run
