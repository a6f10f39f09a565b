"""What functions with an `lru_cache` remember, before a recording and after it.

Nobody can ask such a function what it remembers, nor make it forget one result. But the dict behind it can be found as
the garbage collector finds it, and a key that is gone from there is a call that was never made.
"""

from __future__ import annotations

from typing import Any

from .kinds import tables_of


class CacheBefore:
    """The calls that a cached function remembers, as it was."""

    __slots__ = ("_before", "_cache", "_keys")

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._before = cache.cache_info()
        self._keys = [*_table_of(cache)]

    def forget_later_calls(self) -> None:
        """Make it as it was: tensors of a recording are among what it remembers since then."""
        now = self._cache.cache_info()
        if now == self._before:
            return
        before = self._before
        if before.currsize == before.hits == before.misses == 0:
            self._cache.cache_clear()
            return
        known, table = {*map(id, self._keys)}, _table_of(self._cache)
        for key in [key for key in table if id(key) not in known]:
            del table[key]


def _table_of(cache: Any) -> dict[Any, Any]:
    """The dict in which a cached function looks calls up; one that keeps the order of calls has a list beside it.

    Such a list drops what is not in the dict any more when its turn comes.
    """
    size = cache.cache_info().currsize
    return next((table for table in tables_of(cache) if len(table) == size), {})
