"""Makes `models.py` importable by the tests beside it, which `--import-mode=importlib` does not do
by itself."""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from compiler import Compiler


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Watches what XLA compiles in a process that has compiled nothing before."""
    compiler = Compiler()
    compile_lowered = jax.stages.Lowered.compile

    def compile_watched(lowered: Any, *arguments: Any) -> Any:
        compiler.events.append("compile")
        compiler.act()
        return compile_lowered(lowered, *arguments)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_watched)
    monkeypatch.setattr("fulgurite._src.execution.executables._executables", OrderedDict())
    yield compiler
    compiler.released.set()
    fg.forget_stop_request()
