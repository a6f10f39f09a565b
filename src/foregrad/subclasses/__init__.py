"""Tensor subclasses that wrap other tensors: how they are taken apart and built again. See docs/subclasses.md."""
