"""Foregrad against PyTorch's own AOTAutograd, in one run: `python -m benchmarks`."""
