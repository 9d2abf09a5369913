"""XLA compiles evaluations, and the step for other batches, behind the first steps of a fit."""

import os
import signal
import subprocess
import sys
import threading

import fulgurite as fg
import jax
import numpy as np
import pytest
from compiler import DATA, Compiler, make_engine, wait_for_waiter
from fulgurite.errors import CompilationError
from fulgurite_testing import TinyModel, tiny_data
from fulgurite_testing.memory import InMemoryCheckpointer
from models import Act, Counting, Evaluating, Events, numbers


def test_an_evaluation_is_compiled_behind_the_steps_before_it(compiler: Compiler) -> None:
    """The fit waits at step 1 until XLA has begun with it."""
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=8)
    acting = Act(fg.At(1), lambda run: compiler.wait_for(2))
    engine = make_engine(compiler, evaluating, acting)
    result = engine.fit(Counting, DATA)
    assert evaluating.results == [(8, "val", {"updates": 8.0})]
    assert compiler.events.count("compile") == 2
    assert result.timings.calls["compile"] == 2
    # Another model of these shapes, and another engine, by the same executables.
    assert engine.evaluate(result, engine.evaluations["val"].data, name="val") == {"updates": 8.0}
    make_engine(Evaluating(*evaluating.specs, trigger=8), acting).fit(Counting, DATA)
    assert compiler.events.count("compile") == 2


def test_the_trial_of_an_evaluation_is_compiled_behind_the_steps_before_it(
    compiler: Compiler,
) -> None:
    """Whether its numbers are means over examples is tried at the second batch."""
    begun: list[int] = []
    batch = np.arange(4, dtype=np.float32)
    evaluating = Evaluating(fg.Evaluation("val", [batch, batch]), trigger=8)
    first = Act(fg.At(1), lambda run: compiler.wait_for(3), instance="first")
    second = Act(
        fg.At(8), lambda run: begun.append(compiler.events.count("compile")), instance="second"
    )
    make_engine(compiler, evaluating, first, second).fit(Counting, DATA)
    # The step, the evaluation and the trial, and nothing at the evaluation itself.
    assert begun == [3]
    assert compiler.events.count("compile") == 3


def test_what_is_not_needed_yet_is_compiled_after_the_first_step(compiler: Compiler) -> None:
    begun: list[int] = []
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=8)

    def release(run: fg.Run) -> None:
        begun.append(compiler.events.count("compile"))
        compiler.released.set()

    # The evaluation is traced before this hook is called, while the step compiles.
    compiler.act = compiler.block
    make_engine(compiler, evaluating, fg.LambdaPlugin(on_fit_start=release)).fit(Counting, DATA)
    assert begun == [1]
    assert compiler.events.count("compile") == 2


def test_a_smaller_last_batch_is_compiled_for_before_it_comes(compiler: Compiler) -> None:
    x = np.arange(7, dtype=np.float32)
    data = fg.ArrayData(x, batch_size=4, seed=0, remainder="keep")
    # The step, the trial of the loss, and the step for the smaller batch.
    acting = Act(fg.At(1), lambda run: compiler.wait_for(3))
    result = make_engine(compiler, acting, steps=4).fit(Counting, data)
    assert compiler.events.count("compile") == 3
    assert float(result.module.weight) == -4


def test_a_smaller_last_batch_is_not_compiled_for_by_a_fit_that_ends_before_it(
    compiler: Compiler,
) -> None:
    data = fg.ArrayData(np.arange(7, dtype=np.float32), batch_size=4, seed=0, remainder="keep")
    make_engine(compiler, steps=1).fit(Counting, data)
    # The step, and the trial of the loss.
    assert compiler.events.count("compile") == 2


def test_an_error_of_the_compiler_is_raised_once_by_the_evaluation(compiler: Compiler) -> None:
    events = Events()
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=8)
    engine = make_engine(compiler, evaluating, events)

    def fail_second() -> None:
        if compiler.events.count("compile") == 2:
            compiler.fail()

    compiler.act = fail_second
    with pytest.raises(RuntimeError, match="XLA ran out of registers") as info:
        engine.fit(Counting, DATA)
    assert events.exceptions == [info.value]
    assert "evaluate" in "".join(info.value.__notes__)
    assert "step 8" in "".join(info.value.__notes__)
    engine.fit(Counting, DATA)
    assert evaluating.results == [(8, "val", {"updates": 8.0})]


def test_an_error_of_the_compiler_for_what_nobody_needs_is_dropped(compiler: Compiler) -> None:
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=fg.At(100))
    ending = fg.LambdaPlugin(on_fit_end=lambda: compiler.wait_for(2))

    def fail_second() -> None:
        if compiler.events.count("compile") == 2:
            compiler.fail()

    compiler.act = fail_second
    result = make_engine(compiler, evaluating, ending).fit(Counting, DATA)
    assert int(result.state.step) == 8


def test_two_fits_while_the_evaluation_of_the_first_compiles(compiler: Compiler) -> None:
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=fg.At(8))
    engine = make_engine(
        compiler, evaluating, fg.LambdaPlugin(on_fit_end=lambda: compiler.wait_for(2))
    )

    def block_second() -> None:
        if compiler.events.count("compile") == 2:
            compiler.block()

    compiler.act = block_second
    first = engine.fit(Counting, DATA, steps=4)
    assert (int(first.state.step), compiler.released.is_set()) == (4, False)
    threading.Timer(0.0, compiler.release_once_waited_for).start()
    second = engine.fit(None, DATA, state=first.state, steps=4)
    assert evaluating.results == [(8, "val", {"updates": 8.0})]
    assert int(second.state.step) == 8
    assert compiler.events.count("compile") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_fit_whose_evaluation_compiles(
    compiler: Compiler, number: signal.Signals
) -> None:
    has_begun = threading.Event()

    def interrupt_second() -> None:
        if compiler.events.count("compile") == 2:
            assert has_begun.wait(60)
            wait_for_waiter()
            os.kill(os.getpid(), number)
            compiler.block()

    memory = InMemoryCheckpointer()
    evaluation = fg.Evaluation("val", numbers([0]))
    interrupted = Evaluating(evaluation, trigger=4)
    compiler.act = interrupt_second
    acting = Act(fg.At(1), lambda run: has_begun.set())
    result = make_engine(compiler, memory, interrupted, acting).fit(Counting, DATA)
    assert (result.stop_reason, int(result.state.step)) == (number.name, 4)
    assert not compiler.released.is_set()
    assert interrupted.results == []
    compiler.released.set()
    fg.forget_stop_request()
    resumed = Evaluating(evaluation, trigger=4)
    memory = InMemoryCheckpointer(memory.checkpoints)
    make_engine(memory, resumed, acting).fit(Counting, DATA, resume="latest")
    assert resumed.results == [(step, "val", {"updates": float(step)}) for step in (4, 8)]


def test_a_shape_too_many_is_refused_where_it_comes_and_not_compiled(compiler: Compiler) -> None:
    data = fg.ArrayData(np.arange(7, dtype=np.float32), batch_size=4, seed=0, remainder="keep")
    with pytest.raises(CompilationError, match="the batch for step 2, float32.3.") as info:
        make_engine(compiler, max_compilations=1).fit(Counting, data)
    assert "max_compilations is 1" in str(info.value)
    # The step, and the trial of the loss.
    assert compiler.events.count("compile") == 2


class Agreeing:
    """Has an engine compute as one of several processes does."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return fg.SingleDevice(fg.ProcessSync())


def test_several_processes_compile_what_they_have_agreed_on(compiler: Compiler) -> None:
    counts: list[int] = []
    evaluating = Evaluating(fg.Evaluation("val", numbers([0])), trigger=8)
    counting = fg.LambdaPlugin(on_fit_start=lambda: counts.append(len(compiler.events)))
    acting = Act(fg.At(4), lambda run: counts.append(compiler.events.count("compile")))
    make_engine(Agreeing(), evaluating, counting, acting).fit(Counting, DATA)
    assert counts == [0, 1]
    assert compiler.events.count("compile") == 2


@pytest.mark.full
def test_an_evaluation_follows_the_settings_around_it(compiler: Compiler, unchecked: None) -> None:
    engine = fg.Engine(steps=1, autoload=False)
    model, data = TinyModel(key=jax.random.key(0)), [next(iter(tiny_data()))]
    values = engine.evaluate(model, data)
    assert engine.evaluate(model, data) == values
    assert compiler.events == ["compile"]
    with jax.default_matmul_precision("highest"):
        engine.evaluate(model, data)
    assert compiler.events == ["compile", "compile"]
    with jax.disable_jit():
        by_operation = engine.evaluate(model, data)
    assert compiler.events == ["compile", "compile"]
    assert by_operation == {name: pytest.approx(value) for name, value in values.items()}


UNUSED = """
import threading

import fulgurite as fg
import jax
from fulgurite_testing import TinyModel, tiny_data

compile_lowered = jax.stages.Lowered.compile
has_begun = threading.Event()
has_ended = threading.Event()


def compile_in_order(lowered, *arguments):
    if threading.current_thread().name == "fulgurite-compile":
        print("compiling", flush=True)
        if has_compiled_step:
            has_begun.set()
            has_ended.wait(60)
        has_compiled_step.append(True)
    return compile_lowered(lowered, *arguments)


class Evaluations:
    @fg.hookimpl
    def register_evaluations(self):
        return [fg.Evaluation(name, tiny_data()) for name in ("first", "second")]

    @fg.hookimpl
    def on_fit_end(self):
        has_begun.wait(60)


has_compiled_step = []
jax.stages.Lowered.compile = compile_in_order
fg.Engine(steps=2, plugins=[Evaluations()], autoload=False).fit(TinyModel, tiny_data())
print("trained", flush=True)
has_ended.set()
"""


@pytest.mark.full
def test_a_process_ends_after_the_program_that_xla_has_begun_with() -> None:
    """Neither evaluation is needed: the fit does not wait for the first, and drops the second."""
    process = subprocess.run(
        [sys.executable, "-c", UNUSED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines() == ["compiling", "compiling", "trained"]
