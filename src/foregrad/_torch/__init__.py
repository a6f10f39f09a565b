"""The one seam to torch's private parts, seen to work on torch 2.11 to 2.15.

Every private name that Foregrad touches stands here, with the reason. Nothing else in the package may reach below
torch's public face (a test checks it).
"""

from .names import missing_names as missing_names
from .names import private_names as private_names

try:
    from .autograd import *
    from .bindings import *
    from .cuda_graphs import *
    from .dynamo import *
    from .errors import *
    from .fake import *
    from .guards import *
    from .inductor import *
    from .nested import *
    from .numbers import *
    from .operators import *
    from .questions import *
    from .script import *
    from .symbols import *
except (ImportError, AttributeError) as error:
    import torch

    raise ImportError(
        f"Foregrad works with torch 2.11 to 2.15. Torch {torch.__version__} does not have {', '.join(missing_names())}."
    ) from error
