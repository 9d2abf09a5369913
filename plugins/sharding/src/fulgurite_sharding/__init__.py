"""Meshes for Fulgurite: data, parameters and optimizer state over devices and processes."""

from fulgurite_sharding.consensus import Agreement as Agreement
from fulgurite_sharding.distributed import distributed as distributed
