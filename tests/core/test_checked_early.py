"""Mistakes in evaluations are found before the first step, a trial runs everything once, and
executables of evaluations are told of and counted."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import CompilationError, ConfigurationError, DataError
from models import Act, Counting, Evaluating, Events, numbers


class BrokenValidation(Counting):
    """Its validation step multiplies arrays that do not fit."""

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"x": batch @ jnp.ones((7, 2))})


def observe_steps(events: list[int]) -> Act:
    return Act(1, lambda run: events.append(run.step), instance="steps")


@pytest.mark.parametrize("fast_dev_run", [None, 2])
def test_a_broken_evaluator_that_is_due_late_fails_before_the_first_step(
    fast_dev_run: int | None,
) -> None:
    steps: list[int] = []
    evaluating = Evaluating(fg.Evaluation("test", numbers([0])), trigger=50)
    engine = fg.Engine(
        steps=100,
        fast_dev_run=fast_dev_run,
        plugins=[evaluating, observe_steps(steps)],
        autoload=False,
    )
    with pytest.raises(TypeError, match="dot_general") as caught:
        engine.fit(BrokenValidation, numbers([0]))
    assert steps == []
    assert "evaluator 'test', before the first step" in caught.value.__notes__


def test_a_metric_that_cannot_be_merged_is_found_before_the_first_step() -> None:
    steps: list[int] = []

    class Growing(fg.metrics.Metric):
        values: jax.Array

        def merge(self, other: Any) -> Any:
            return Growing(jnp.concatenate([self.values, other.values]))

        def compute(self) -> Any:
            return self.values.sum()

    metrics = {"grows": lambda preds, batch, mask: Growing(batch)}
    evaluating = Evaluating(fg.Evaluation("test", numbers([1, 2]), metrics=metrics), trigger=50)
    with pytest.raises(Exception, match="grows"):
        fg.Engine(steps=100, plugins=[evaluating, observe_steps(steps)], autoload=False).fit(
            Counting, numbers([0])
        )
    assert steps == []


def test_the_check_reads_one_batch_and_leaves_a_stateful_source_as_it_was() -> None:
    class Stream:
        """Counts on; its state is the next number."""

        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Any:
            while self.next < 3:
                self.next += 1
                yield np.full(1, self.next, np.float32)
            self.next = 0

        def get_state(self) -> Any:
            return self.next

        def set_state(self, state: Any) -> None:
            self.next = state

    largest = {"sum": lambda preds, batch, mask: fg.metrics.Sum.from_values(batch, mask)}
    evaluating = Evaluating(fg.Evaluation("test", Stream(), metrics=largest), trigger=2)
    fg.Engine(steps=4, plugins=[evaluating], autoload=False).fit(Counting, numbers([0]))
    assert [metrics["sum"] for _, _, metrics in evaluating.results] == [6, 6]


def test_an_iterator_is_refused_as_the_data_of_an_evaluator() -> None:
    data = (np.zeros(1, np.float32) for _ in range(3))
    evaluating = Evaluating(fg.Evaluation("test", data), trigger=200)
    with pytest.raises(DataError, match=r"'test' is an iterator \(generator\).*iterated again"):
        fg.Engine(steps=1, plugins=[evaluating], autoload=False).fit(Counting, numbers([0]))
    assert next(data) is not None


def test_a_trial_runs_every_action_once_whatever_its_trigger() -> None:
    ran: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda run: ran.append((name, run.step))

    plugins = [
        Act(1000, note("rare"), instance="rare"),
        Act(fg.EverySeconds(3600), note("clock"), instance="clock"),
        Act(1, note("each"), instance="each"),
        Act(fg.At(1), note("early"), instance="early"),
    ]
    evaluating = Evaluating(fg.Evaluation("test", numbers([1], [2], [3])), trigger=5000)
    engine = fg.Engine(steps=9999, fast_dev_run=2, plugins=[*plugins, evaluating], autoload=False)
    engine.fit(Counting, numbers([0]))
    assert sorted(ran) == [("clock", 2), ("each", 1), ("each", 2), ("early", 1), ("rare", 2)]
    assert [(step, name) for step, name, _ in evaluating.results] == [(2, "test")]


def test_only_what_a_trial_does_not_reach_is_added() -> None:
    ran: list[int] = []
    fg.Engine(steps=6, plugins=[Act(4, lambda run: ran.append(run.step))], autoload=False).fit(
        Counting, numbers([0])
    )
    assert ran == [4]


def test_executables_of_evaluations_and_predictions_are_told_by_name() -> None:
    events = Events()
    evaluating = Evaluating(fg.Evaluation("test", numbers([1, 2], [3])), trigger=2)
    engine = fg.Engine(steps=4, plugins=[evaluating, events], autoload=False)
    result = engine.fit(Counting, numbers([0]))
    names = [name for name, _, _ in events.compiled]
    assert names == ["step", "evaluate.test", "evaluate.test"]
    assert [spec.shape for _, spec, _ in events.compiled] == [(1,), (2,), (1,)]
    assert all(compiled.memory_analysis() is not None for _, _, compiled in events.compiled)
    assert engine.predict(result, numbers([5])).tolist() == [5]
    assert [name for name, _, _ in events.compiled][3:] == ["predict"]


def test_the_cap_on_compilations_holds_for_each_evaluation() -> None:
    engine = fg.Engine(max_compilations=2, autoload=False)
    uneven = [np.zeros(size, np.float32) for size in (1, 2, 3)]
    with pytest.raises(CompilationError, match=r"evaluate\.long, .*shape number 3.*is 2") as caught:
        engine.evaluate(Counting(), uneven, name="long")
    assert "float32[1]" in str(caught.value) and "float32[2]" in str(caught.value)
    with pytest.raises(CompilationError, match=r"batch 2 of predict"):
        engine.predict(Counting(), uneven)
    assert engine.evaluate(Counting(), uneven[:2], name="other")["updates"] == 0


def test_host_states_that_are_no_json_are_found_by_a_trial() -> None:
    pytest.importorskip("fulgurite_checkpoint")
    from fulgurite_checkpoint import Checkpointer

    class Holder:
        @fg.hookimpl
        def get_host_state(self) -> Any:
            return {"object": object()}

    engine = fg.Engine(
        steps=9, fast_dev_run=1, run_dir="unused", plugins=[Checkpointer(1000), Holder()]
    )
    with pytest.raises(ConfigurationError, match="plugin 'holder', hook get_host_state"):
        engine.fit(Counting, numbers([0]))
