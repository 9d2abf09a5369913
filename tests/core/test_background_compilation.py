"""XLA compiles the first step of a fit on a thread while the rest of the fit begins."""

import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import pytest
from compiler import DATA, Compiler, make_engine, wait_for_waiter
from fulgurite_optimizers import Freeze
from fulgurite_testing.memory import InMemoryCheckpointer
from models import Counting, Events, assert_same_bits, numbers, trained


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 1}, {"fast_dev_run": 2}])
def test_the_step_is_compiled_once_and_before_the_fit_begins(
    compiler: Compiler, options: dict[str, Any]
) -> None:
    result = make_engine(compiler, **options).fit(Counting, DATA)
    assert compiler.events == ["compile", "fit"]
    assert result.timings.calls["compile"] == 1
    assert result.timings.background_seconds.keys() == {"compile"}


def test_an_error_of_the_compiler_is_raised_once_where_the_step_is_taken(
    compiler: Compiler,
) -> None:
    events = Events()
    engine = make_engine(compiler, events)
    compiler.act = compiler.fail
    with pytest.raises(RuntimeError, match="XLA ran out of registers") as info:
        engine.fit(Counting, DATA)
    assert compiler.events == ["compile", "fit"]
    assert events.exceptions == [info.value]
    # The same engine compiles it again.
    compiler.act = lambda: None
    assert int(engine.fit(Counting, DATA).state.step) == 8


def test_an_error_of_the_compiler_in_a_loop_of_steps_leaves_the_state(compiler: Compiler) -> None:
    engine = make_engine()
    state = engine.init_state(Counting, DATA)
    compiler.act = compiler.fail
    with pytest.raises(RuntimeError, match="XLA ran out of registers"):
        engine.step(state, DATA[0])
    compiler.act = lambda: None
    state, _ = engine.step(state, DATA[0])
    assert int(state.step) == 1


@pytest.mark.variants("full")
@pytest.mark.parametrize("is_waited_for", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_fit_whose_first_step_compiles(
    compiler: Compiler, number: signal.Signals, *, is_waited_for: bool
) -> None:
    def interrupt() -> None:
        if is_waited_for:
            wait_for_waiter()
        os.kill(os.getpid(), number)
        compiler.block()

    memory = InMemoryCheckpointer()
    compiler.act = interrupt
    result = make_engine(memory).fit(Counting, DATA)
    # The compiler has not come back.
    assert not compiler.released.is_set()
    assert (result.stop_reason, int(result.state.step)) == (number.name, 0)
    text = f"the compiler kept training waiting after {number.name} and is abandoned"
    assert any(text in str(message) for message in result.messages) is is_waited_for
    compiler.released.set()
    compiler.act = lambda: None
    fg.forget_stop_request()
    resumed = make_engine(InMemoryCheckpointer(memory.checkpoints)).fit(
        Counting, DATA, resume="latest"
    )
    assert_same_bits(trained(resumed.state), trained(make_engine().fit(Counting, DATA).state))


@pytest.mark.full
def test_a_signal_while_another_batch_is_compiled_for_saves_what_was_trained(
    compiler: Compiler,
) -> None:
    data = numbers([0], [1], [2, 3], [4, 5])

    def interrupt_second() -> None:
        if compiler.events.count("compile") == 2:
            wait_for_waiter()
            os.kill(os.getpid(), signal.SIGTERM)
            compiler.block()

    memory = InMemoryCheckpointer()
    compiler.act = interrupt_second
    result = make_engine(compiler, memory).fit(Counting, data)
    assert (result.stop_reason, int(result.state.step)) == ("SIGTERM", 2)
    compiler.released.set()
    fg.forget_stop_request()
    resumed = make_engine(InMemoryCheckpointer(memory.checkpoints)).fit(
        Counting, data, resume="latest"
    )
    assert_same_bits(trained(resumed.state), trained(make_engine().fit(Counting, data).state))


def test_a_restored_run_compiles_before_it_begins_and_a_finished_one_does_not(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine().fit(Counting, DATA)
    memory = InMemoryCheckpointer()
    make_engine(memory, steps=3).fit(Counting, DATA)
    monkeypatch.setattr("fulgurite._src.execution.executables._executables", OrderedDict())
    compiler.events.clear()
    resumed = make_engine(memory, compiler).fit(Counting, DATA, resume="latest")
    assert compiler.events == ["compile", "fit"]
    assert_same_bits(trained(resumed.state), trained(expected.state))
    monkeypatch.setattr("fulgurite._src.execution.executables._executables", OrderedDict())
    compiler.events.clear()
    make_engine(memory, compiler).fit(Counting, DATA, resume="latest")
    assert compiler.events == ["fit"]


@dataclass(frozen=True, eq=False)
class Announcing(InMemoryCheckpointer):
    """Copies its arrays once XLA has begun to compile.

    Attributes:
        compiler: notes when that is.
        announced: the step of the checkpoint that it announces; None for the one that it returns.
    """

    compiler: Compiler = field(default_factory=Compiler)
    announced: int | None = None

    @fg.hookimpl
    def restore_checkpoint(
        self,
        resume: fg.CheckpointRef | str | int,
        template: fg.TrainState,
        announce: Callable[[fg.Snapshot], None],
    ) -> fg.Snapshot | None:
        def announce_first(snapshot: fg.Snapshot) -> None:
            if self.announced is not None:
                step = np.int32(self.announced)
                announce(replace(snapshot, state=snapshot.state.replace(step=step)))
                return
            announce(snapshot)
            self.compiler.wait_for(1)
            self.compiler.events.append("read")

        return super().restore_checkpoint(resume, template, announce_first)


@pytest.mark.parametrize("options", [{}, {"max_compilations": 1}, {"fast_dev_run": 2}])
def test_a_restored_run_compiles_before_its_arrays_are_read(
    compiler: Compiler, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemoryCheckpointer()
    make_engine(memory, steps=3).fit(Counting, DATA)
    monkeypatch.setattr("fulgurite._src.execution.executables._executables", OrderedDict())
    compiler.events.clear()
    announcing = Announcing(memory.checkpoints, compiler)
    resumed = make_engine(announcing, compiler, **options).fit(Counting, DATA, resume="latest")
    assert compiler.events == ["compile", "read", "fit"]
    assert resumed.timings.calls["compile"] == 1


@pytest.mark.full
@pytest.mark.parametrize("step", [6, 99])
def test_another_checkpoint_than_was_announced_trains_as_it_would(
    compiler: Compiler, step: int
) -> None:
    """Another rule applies after step 6, and step 99 is past the end."""
    freeze = Freeze("weight", until=5)
    expected = make_engine(freeze).fit(Counting, DATA)
    memory = InMemoryCheckpointer()
    make_engine(memory, freeze, steps=3).fit(Counting, DATA)
    announcing = Announcing(memory.checkpoints, compiler, announced=step)
    resumed = make_engine(announcing, freeze).fit(Counting, DATA, resume="latest")
    assert float(expected.module.weight) == -3
    assert_same_bits(trained(resumed.state), trained(expected.state))


def test_a_second_fit_takes_what_the_first_one_has_begun_to_compile(compiler: Compiler) -> None:
    failures = [ValueError("no room for the logs")]

    def begin(run: fg.Run) -> None:
        if failures:
            raise failures.pop()
        compiler.released.set()

    engine = make_engine(compiler, fg.LambdaPlugin(on_fit_start=begin))
    compiler.act = compiler.block
    with pytest.raises(ValueError, match="no room for the logs"):
        engine.fit(Counting, DATA)
    assert not compiler.released.is_set()
    assert int(engine.fit(Counting, DATA).state.step) == 8
    assert compiler.events.count("compile") == 1


def test_a_state_of_weak_types_gets_a_step_of_its_own(compiler: Compiler) -> None:
    """It has the shapes and dtypes for which was compiled ahead, and another program."""
    engine = make_engine(compiler)
    state = engine.init_state(Counting, DATA)
    weak = state.replace(
        module=jax.tree.map(lambda leaf: 1.0 * jax.numpy.asarray(0.5), state.module)
    )
    assert any(leaf.weak_type for leaf in jax.tree.leaves(weak.module))
    result = engine.fit(None, DATA, state=weak)
    strong = engine.init_state(Counting, DATA)
    strong = strong.replace(module=jax.tree.map(lambda leaf: jax.numpy.float32(0.5), strong.module))
    assert_same_bits(trained(result.state), trained(engine.fit(None, DATA, state=strong).state))


PROGRAM = """
import fulgurite as fg
import jax
from fulgurite_testing import TinyModel, tiny_data

compile_lowered = jax.stages.Lowered.compile


def compile_slowly(lowered, *arguments):
    print("compiling", flush=True)
    for _ in range(20):
        executable = compile_lowered(lowered, *arguments)
    print("compiled", flush=True)
    return executable


def begin(run):
    raise ValueError("no room for the logs")


jax.stages.Lowered.compile = compile_slowly
fg.Engine(steps=8, plugins=[fg.LambdaPlugin(on_fit_start=begin)], autoload=False).fit(
    TinyModel, tiny_data()
)
"""


@pytest.mark.full
def test_a_process_that_ends_while_xla_compiles_ends_as_it_would_otherwise() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 1
    assert "ValueError: no room for the logs" in process.stderr
    assert "FATAL" not in process.stderr
    assert process.stdout.splitlines()[-2:] == ["compiling", "compiled"]
