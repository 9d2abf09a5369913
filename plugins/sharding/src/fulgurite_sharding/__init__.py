"""Meshes for Fulgurite: data, parameters and optimizer state over devices and processes."""

from fulgurite_sharding.consensus import Agreement as Agreement
from fulgurite_sharding.distributed import distributed as distributed
from fulgurite_sharding.inspection import ReplicaError as ReplicaError
from fulgurite_sharding.inspection import bytes_per_device as bytes_per_device
from fulgurite_sharding.inspection import check_replicas as check_replicas
from fulgurite_sharding.inspection import gather as gather
from fulgurite_sharding.inspection import show as show
from fulgurite_sharding.plugin import DataParallel as DataParallel
from fulgurite_sharding.plugin import Fsdp as Fsdp
from fulgurite_sharding.plugin import Sharding as Sharding
from fulgurite_sharding.plugin import TensorParallel as TensorParallel
from fulgurite_sharding.rules import BySize as BySize
from fulgurite_sharding.rules import Rule as Rule
