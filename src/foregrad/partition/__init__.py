"""Cut the joint graph into a forward and a backward, and say what is saved between them."""

from .default import cut, default_partition
from .rematerialize import min_cut_rematerialization_partition, rematerialized
from .report import PartitionReport

__all__ = [
    "PartitionReport",
    "cut",
    "default_partition",
    "min_cut_rematerialization_partition",
    "rematerialized",
]
