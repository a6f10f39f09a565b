"""The one seam to torch's private parts, seen to work on torch 2.11 and 2.13.

Every private name that Foregrad touches stands here, with the reason. Nothing else in the package may reach below
torch's public face (a test checks it).
"""

from .autograd import *
from .errors import *
from .fake import *
from .guards import *
from .inductor import *
from .nested import *
from .operators import *
from .questions import *
from .script import *
from .symbols import *
