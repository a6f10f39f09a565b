"""Behind `torch.compile`: Dynamo records the Python code and guards its calls, Foregrad does what comes after.

>>> import torch, foregrad
>>> f = torch.compile(lambda x: x.sin().sum(), backend=foregrad.backend("eager"))
>>> x = torch.zeros(2, requires_grad=True)
>>> f(x).backward(); x.grad
tensor([1., 1.])
"""

from .backends import DynamoBackend as DynamoBackend
from .backends import backend as backend
