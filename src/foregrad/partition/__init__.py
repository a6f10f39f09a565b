"""Cut the joint graph into a forward and a backward, and say what is saved between them."""

from .default import default_partition
from .rematerialize import min_cut_rematerialization_partition
from .report import PartitionReport

__all__ = ["PartitionReport", "default_partition", "min_cut_rematerialization_partition"]
