"""Meshes for Fulgurite: data, parameters and optimizer state over devices and processes."""

__tracebackhide__ = True

from fulgurite_sharding.device_means import average_by_device as average_by_device
from fulgurite_sharding.distributed import initialize_distributed as initialize_distributed
from fulgurite_sharding.inspection import (
    ReplicaError as ReplicaError,
    bytes_per_device as bytes_per_device,
    check_replicas as check_replicas,
    gather as gather,
    visualize_sharding as visualize_sharding,
)
from fulgurite_sharding.parallel_call import parallel as parallel
from fulgurite_sharding.plugin import (
    FSDP as FSDP,
    DataParallel as DataParallel,
    Sharding as Sharding,
    TensorParallel as TensorParallel,
)
from fulgurite_sharding.profiles import Profile as Profile, read_profile as read_profile
from fulgurite_sharding.rules import Rule as Rule, ShardBySize as ShardBySize
from fulgurite_sharding.strategy import MeshStrategy as MeshStrategy
from fulgurite_sharding.sync import CoordinatedSync as CoordinatedSync
