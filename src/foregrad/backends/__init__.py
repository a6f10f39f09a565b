"""What runs the graphs of `foregrad.compile`: a backend is a name, or a function that compiles a graph.

>>> import foregrad
>>> foregrad.backends.names()[:2]
['inductor', 'eager']
"""

from .backend import Backend as Backend
from .eager import run_graph as run_graph
from .registry import named as named
from .registry import names as names

__all__ = ["Backend", "named", "names", "run_graph"]
