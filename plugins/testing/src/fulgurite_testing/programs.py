"""Compiled programs, kept for all runs of the checks."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

KEPT = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def compiled_once() -> Iterator[None]:
    """Has JAX compile programs that are alike once in this process, as most of those of the checks
    are. Where it keeps programs in a directory already, that one is used."""
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        yield
        return
    before = {name: getattr(jax.config, name) for name in KEPT}
    # JAX has noted that there is none, where something was compiled before.
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(_directory())
    try:
        for name, value in KEPT.items():
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
