"""The fixtures that pytest finds by itself. Nothing of jax or Fulgurite is imported before one of
them is used."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import fulgurite as fg

    from fulgurite_testing.events import Events


@pytest.fixture
def tiny_engine() -> "Callable[..., fg.Engine]":
    """`tiny_engine(*plugins, **settings)`: an engine for 8 steps that logs every second one;
    nothing is autoloaded."""
    from fulgurite_testing.tiny import tiny_engine

    return tiny_engine


@pytest.fixture
def record_events() -> "Callable[[], Events]":
    """`record_events()`: a plugin that keeps the events and records of the runs that it is given
    to."""
    from fulgurite_testing.events import Events

    return Events


@pytest.fixture
def run_with(tmp_path: Path) -> "Callable[..., tuple[fg.FitResult, Events]]":
    """`run_with(*plugins, resume=None, **settings)`: trains the tiny model with them in a run
    directory of its own, and gives the result and what was recorded."""
    from fulgurite_testing.events import Events
    from fulgurite_testing.tiny import TinyModel, tiny_data, tiny_engine

    runs = 0

    def run(*plugins: Any, resume: Any = None, **settings: Any) -> "tuple[fg.FitResult, Events]":
        nonlocal runs
        runs += 1
        events = Events()
        engine = tiny_engine(*plugins, events, **{"run_dir": tmp_path / f"run-{runs}", **settings})
        return engine.fit(TinyModel, tiny_data(), resume=resume), events

    return run
