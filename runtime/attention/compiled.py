"""Compiled functions kept on disk: numba's own cache, in a folder of ours.

numba writes beside the source, which may be read-only, or to one folder for the whole process. It also numbers the
files of one function by what it finds there, so that two processes that start at once can take each other's. Here each
function has a folder of its own, named after all that it depends on: whoever writes there writes the same.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from llvmlite import binding
from numba.core import caching

log = logging.getLogger(__name__)


def kept(function: Any, signature: Any, folder: Path, *uses: ModuleType) -> Callable[..., None]:
    """`function` compiled for `signature` alone: from the folder if it is there, else put there if that can be done.

    Args:
        uses: other modules whose code becomes part of it.
    """
    files = [inspect.getfile(function.py_func), *map(inspect.getfile, uses)]
    source = b"".join(Path(file).read_bytes() for file in files)
    cells = [cell.cell_contents for cell in function.py_func.__closure__ or ()]
    cells = [value for value in cells if isinstance(value, int | float)]  # functions are in the sources
    machine = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    stamp = hashlib.sha256(repr((numba.__version__, machine, cells, signature)).encode() + source).hexdigest()
    path = folder / stamp[:16]
    try:
        path.mkdir(parents=True, exist_ok=True)
        function._cache = _cache_in(path, stamp)(function.py_func)
        function.compile(signature)
    except Exception as error:  # a full disk, a folder that is read-only, what a broken disk left there, another numba
        log.warning("compiled code cannot be kept in %s, and is made anew each time: %r", path, error)
        function._cache = caching.NullCache()
        function.compile(signature)
    function.disable_compile()
    compiled: Callable[..., None] = function
    return compiled


def _cache_in(path: Path, stamp: str) -> type[Any]:
    """A class of cache, as numba takes one."""

    class Locator(caching._CacheLocator):  # type: ignore[misc]  # numba has no types, so its classes count as Any
        def get_cache_path(self) -> str:
            return str(path)

        def get_source_stamp(self) -> str:
            return stamp

        def get_disambiguator(self) -> str:
            return ""

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls()

    class Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]  # likewise
        _locator_classes = (Locator,)

    class Cache(caching.FunctionCache):  # type: ignore[misc]  # likewise
        _impl_class = Implementation

        def _index_key(self, signature: Any, codegen: Any) -> Any:
            return signature, codegen.magic_tuple(), stamp  # numba's own differs for each process if functions are used

    return Cache
