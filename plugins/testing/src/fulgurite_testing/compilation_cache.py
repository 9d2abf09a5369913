"""Compiled programs, shared by all runs of the checks."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

CACHE_EVERYTHING = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def share_compiled_programs() -> Iterator[None]:
    """Have JAX compile equal programs once in this process; most programs of the checks are equal.

    Where JAX keeps programs in a directory already, that one is used.
    """
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        yield
        return
    before = {name: getattr(jax.config, name) for name in CACHE_EVERYTHING}
    # If something was compiled before, JAX remembers that there is no cache.
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(_directory())
    try:
        for name, value in CACHE_EVERYTHING.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@functools.cache
def _directory() -> str:
    directory = tempfile.mkdtemp(prefix="fulgurite-testing-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
