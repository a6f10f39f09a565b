"""Abstract tensors: metadata without data, and the engines that work it out."""
