"""Cut the joint graph into a forward and a backward, and say what is saved between them."""

from .default import default_partition

__all__ = ["default_partition"]
