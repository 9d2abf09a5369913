"""Records of Fulgurite for Weights & Biases: `Engine(plugins=[WandbLogger("digits",
mode="offline")])`."""

from fulgurite_wandb.plugin import WandbLogger as WandbLogger
from fulgurite_wandb.runfile import read_run as read_run
