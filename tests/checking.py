"""`foregrad.check`, under the name that the tests use."""

from foregrad import check as check_core

__all__ = ["check_core"]
