"""The fixtures that pytest finds by itself.

jax and Fulgurite are not imported before one of them is used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import fulgurite as fg

    from fulgurite_testing.events import EventRecorder


@pytest.fixture
def tiny_engine() -> "Callable[..., fg.Engine]":
    """Return `tiny_engine(*plugins, **settings)`, which builds an engine for 8 single steps that
    logs every second one and autoloads nothing."""
    from fulgurite_testing.tiny import tiny_engine

    return tiny_engine


@pytest.fixture
def record_events() -> "Callable[[], EventRecorder]":
    """Return `record_events()`, which builds a plugin that keeps the events and records of its
    runs."""
    from fulgurite_testing.events import EventRecorder

    return EventRecorder


@pytest.fixture
def run_with(tmp_path: Path) -> "Callable[..., tuple[fg.FitResult, EventRecorder]]":
    """Return `run_with(*plugins, resume=None, **settings)`, which trains the tiny model with the
    plugins in a run directory of its own, and returns the result and the recorded events."""
    from fulgurite_testing.events import EventRecorder
    from fulgurite_testing.tiny import TinyModel, tiny_data, tiny_engine

    runs = 0

    def run(
        *plugins: Any, resume: Any = None, **settings: Any
    ) -> "tuple[fg.FitResult, EventRecorder]":
        nonlocal runs
        runs += 1
        events = EventRecorder()
        engine = tiny_engine(*plugins, events, **{"run_dir": tmp_path / f"run-{runs}", **settings})
        return engine.fit(TinyModel, tiny_data(), resume=resume), events

    return run
