"""Plugins and data that end the program, or return what has no value: an error names them, and what was
trained is saved."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import DataError, FulguriteError, PluginError
from fulgurite_checkpoint import Checkpointer
from fulgurite_runs import RunDirectory
from models import Act, Counting, numbers

BATCH = np.zeros(1, np.float32)
leaked: list[jax.Array] = []


@jax.jit
def leak(number: jax.Array) -> jax.Array:
    """Keep an array that has no value once this has returned."""
    leaked.append(number)
    return number


leak(jnp.zeros(()))


def fit(*plugins: Any, data: Any = None, **options: Any) -> fg.FitResult:
    engine = fg.Engine(steps=6, plugins=plugins, autoload=False, log_every=2, **options)
    return engine.fit(Counting, numbers([0], [0]) if data is None else data)


def list_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints of a run."""
    return [step for step, _ in RunDirectory(run).list_checkpoints()]


def make_plugin(hook: str, answer: Any) -> Any:
    """Return a plugin called `bad` whose hook returns what a function returns."""

    def call(self: Any) -> Any:
        return answer()

    return type("Bad", (), {"plugin_name": "bad", hook: fg.hookimpl(specname=hook)(call)})()


def leave(run: fg.Run) -> None:
    sys.exit(0)


# wandb, where another test has imported it, gives `sys.exit()` the code 0.
def end_data() -> Iterator[np.ndarray]:
    yield from [BATCH] * 3
    sys.exit()


class Ending:
    """Data that ends the program after its third batch."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return end_data()


def test_a_program_that_an_action_would_end_saves_what_it_has_trained(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugin 'act' called sys\.exit\(0\)") as caught:
        fit(Act(fg.At(3), leave), Checkpointer(), run_dir=tmp_path)
    assert any("action act, step 3" in note for note in caught.value.__notes__)
    assert list_steps(tmp_path) == [3]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_program_that_its_data_would_end_saves_what_it_has_trained(
    tmp_path: Path, prefetch: int
) -> None:
    data = fg.DataSource(Ending(), prefetch=prefetch, resume="replay", name="pages")
    with pytest.raises(DataError, match=r"the data source called sys\.exit\(0?\)") as caught:
        fit(Checkpointer(), data=data, run_dir=tmp_path)
    assert "the data source 'pages' made the batch for step 4" in caught.value.__notes__[0]
    assert list_steps(tmp_path) == [3]


def test_a_signal_handler_of_the_program_may_end_it() -> None:
    """Only what plugins do themselves is a mistake of theirs."""

    def handle(number: int, frame: FrameType | None) -> None:
        sys.exit(3)

    former = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(SystemExit) as caught:
            fit(Act(fg.At(3), lambda run: signal.raise_signal(signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert caught.value.code == 3


def generate() -> Iterator[int]:
    yield 1


async def wait() -> int:
    return 1


HOOKS = ("on_fit_start", "on_epoch_end", "get_host_state", "step_metrics", "transform_batch")


@pytest.mark.variants("full")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sys.exit, r"called sys\.exit\(0?\)"),
        (generate, "returned a generator, whose code has not run"),
        (wait, "returned a coroutine, whose code has not run"),
        (lambda: {"a": leaked[0]}, "returned .* of (another trace|a step that was traced)"),
    ],
    ids=["exit", "generator", "coroutine", "leaked"],
)
def test_a_hook_that_returns_no_value_is_named_with_its_plugin(
    hook: str, answer: Any, reason: str
) -> None:
    save = Act(fg.At(3), fg.Run.snapshot)
    with pytest.raises(PluginError, match=reason) as caught:
        fit(make_plugin(hook, answer), save)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "plugin 'bad'" in text and f"hook {hook}" in text


def test_a_host_state_that_cannot_be_copied_is_named_with_its_plugin() -> None:
    bad = make_plugin("get_host_state", lambda: {"lock": threading.Lock()})
    with pytest.raises(TypeError, match="lock") as caught:
        fit(bad, Act(2, fg.Run.snapshot))
    assert "plugin 'bad'" in caught.value.__notes__[0]


@pytest.mark.parametrize("hook", ["around_fit", "fit_context"])
def test_a_context_that_fails_when_it_is_entered_is_named_with_its_plugin(hook: str) -> None:
    @contextmanager
    def enter() -> Iterator[None]:
        raise KeyError("no such thing")
        yield

    with pytest.raises(KeyError, match="no such thing") as caught:
        fit(make_plugin(hook, enter))
    (note,) = [note for note in caught.value.__notes__ if "plugin 'bad'" in note]
    assert f"hook {hook}" in note


def test_an_action_that_has_not_run_is_an_error() -> None:
    async def act(run: fg.Run) -> None: ...

    with pytest.raises(FulguriteError, match="action act returned a coroutine"):
        fit(Act(fg.At(2), act))


def test_a_traced_hook_that_comes_to_the_end_of_an_iterator_is_named() -> None:
    bad = make_plugin("transform_batch", lambda: next(iter(())))
    with pytest.raises(StopIteration) as caught:
        fit(bad)
    assert "plugin 'bad'" in "".join(caught.value.__notes__)
