"""Helpers of these tests, and the benchmark's models, can be imported by name."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]
