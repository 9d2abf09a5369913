"""Meshes for Fulgurite: data, parameters and optimizer state over devices and processes."""

from fulgurite_sharding.consensus import Agreement as Agreement
from fulgurite_sharding.distributed import distributed as distributed
from fulgurite_sharding.inspection import (
    ReplicaError as ReplicaError,
    bytes_per_device as bytes_per_device,
    check_replicas as check_replicas,
    gather as gather,
    show as show,
)
from fulgurite_sharding.plugin import (
    DataParallel as DataParallel,
    Fsdp as Fsdp,
    Sharding as Sharding,
    TensorParallel as TensorParallel,
)
from fulgurite_sharding.rules import BySize as BySize, Rule as Rule
