"""Actions that are interrupted in their middle: the run that resumes does them once (faults, 1)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer, load
from trained import ZEROS, Act, Counting, counting, engine, steps_in


class Breaking:
    """Two batches; at one of the passes something happens before the second one."""

    def __init__(self, happen: Any, at_pass: int) -> None:
        self.happen = happen
        self.at_pass = at_pass
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield np.zeros(1, np.float32)
        # The first pass is that of the check before the first step.
        if self.passes == 1 + self.at_pass:
            self.happen()
        yield np.zeros(1, np.float32)


class Trying:
    """Counts its evaluations before it runs them, on the host and in what plugins share."""

    def __init__(self, data: Any, look: "Look") -> None:
        self.tries = 0
        self.history: list[int] = []
        self.data = data
        self.look = look

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("val", fg.DataSource(self.data, prefetch=0))]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("try", 2, self.run, "evaluate")]

    def run(self, run: fg.Run) -> None:
        self.tries += 1
        self.history.append(run.step)
        self.look.tries += 1
        run.shared.setdefault("trying", {})["tries"] = self.tries
        run.shared.setdefault("all", {})["tries"] = run.shared["trying"]["tries"]
        numbers = run.metrics.setdefault("tried", {"times": 0})
        numbers["times"] += 1
        run.evaluate("val")

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"tries": self.tries, "history": self.history}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        self.tries = state["tries"]
        self.history = state["history"]


class TryingAtEpochs(Trying):
    """Does the same as the engine ends an epoch."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return []

    @fg.hookimpl
    def on_epoch_end(self, run: fg.Run) -> None:
        self.run(run)


class Look:
    """Is changed by the actions of another plugin, and keeps what is shared at the end."""

    def __init__(self) -> None:
        self.tries = 0
        self.shared: Any = None

    @fg.hookimpl
    def on_epoch_end(self) -> None:
        self.tries += 10

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"tries": self.tries}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        self.tries = state["tries"]

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        self.shared = {name: dict(values) for name, values in run.shared.items()}


def fail() -> None:
    raise OSError("the disk is gone")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Trying, TryingAtEpochs])
@pytest.mark.parametrize("happen", [fail, pytest.param(terminate, marks=pytest.mark.full)])
def test_an_interrupted_action_begins_from_the_state_before_it(
    happen: Any, kind: type[Trying], tmp_path: Path
) -> None:
    def train(run_dir: Path, data: Any) -> tuple[Trying, Look, fg.FitResult]:
        look = Look()
        trying = kind(data, look)
        plugins = [Checkpointer(100), look, trying]
        batches = [np.zeros(1, np.float32)] * 2
        fit_engine = engine(run_dir, *plugins, epochs=3, log_every=None)
        return trying, look, fit_engine.fit(Counting, batches, resume="auto")

    whole, looked, result = train(tmp_path / "whole", Breaking(happen, 99))
    assert whole.history == [2, 4, 6]
    assert looked.tries == 3 * 11
    assert looked.shared == {"trying": {"tries": 3}, "all": {"tries": 3}}
    assert result.metrics["tried"] == {"times": 3}
    if happen is fail:
        with pytest.raises(OSError, match="the disk is gone"):
            train(tmp_path / "run", Breaking(happen, 2))
    else:
        stopped = train(tmp_path / "run", Breaking(happen, 2))[2]
        assert stopped.stop_reason == "SIGTERM" and int(stopped.state.step) == 4
    resumed, looked_again, result_again = train(tmp_path / "run", Breaking(happen, 99))
    assert (resumed.tries, resumed.history) == (whole.tries, whole.history)
    assert (looked_again.tries, looked_again.shared) == (looked.tries, looked.shared)
    assert result_again.metrics == result.metrics


@pytest.mark.full
def test_the_reason_to_stop_is_said_again_where_another_action_was_pending(tmp_path: Path) -> None:
    def stop(run: fg.Run) -> fg.StopTraining:
        return fg.StopTraining("it is good enough")

    def fail(run: fg.Run) -> None:
        raise RuntimeError

    def fit(act: Any) -> fg.FitResult:
        stopping = Act(fg.At(3), stop, "decide")
        acting = fg.LambdaPlugin("acting", every={fg.At(3): act})
        trainer = engine(tmp_path, Checkpointer(1), stopping, acting, steps=5, log_every=None)
        return trainer.fit(Counting, ZEROS, resume="auto")

    with pytest.raises(RuntimeError):
        fit(fail)
    for _ in range(2):
        result = fit(lambda run: None)
        assert (result.stop_reason, int(result.state.step)) == ("it is good enough", 3)


class Slow(fg.Module):
    """Takes some milliseconds a step, so that metrics are not computed yet when actions run."""

    weight: Any

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.eye(400)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        product = jnp.eye(400)
        for _ in range(20):
            product = jnp.tanh(product @ self.weight)
        return fg.Output(product.mean() + batch.mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


class Keeper:
    """Keeps a snapshot of the run that an exception ends."""

    def __init__(self) -> None:
        self.num_records = 0
        self.snapshot: fg.Snapshot | None = None

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        self.snapshot = run.snapshot()


class CountingKeeper(Keeper):
    """Counts records in its host state, too."""

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        self.num_records += record.stream == "exact"

    @fg.hookimpl
    def get_host_state(self) -> int:
        return self.num_records

    @fg.hookimpl
    def set_host_state(self, state: int, version: int) -> None:
        self.num_records = state


class Failing:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("fail", fg.At(8), lambda run: fail(), "act")]


@pytest.mark.parametrize("kind", [Keeper, CountingKeeper])
def test_an_interrupted_action_comes_after_the_metrics_of_its_step(kind: type[Keeper]) -> None:
    keeper = kind()
    fit_engine = fg.Engine(steps=12, log_every=4, plugins=[keeper, Failing()], autoload=False)
    data = [np.full(1, step, np.float32) for step in range(12)]
    with pytest.raises(OSError, match="the disk is gone"):
        fit_engine.fit(Slow, data)
    snapshot = keeper.snapshot
    assert snapshot is not None
    assert [record.step for record in snapshot.history] == [4, 8]
    assert snapshot.metrics["train"] == snapshot.history[-1].values
    states = [entry["state"] for entry in snapshot.host_states.values()]
    assert states == ([2] if kind is CountingKeeper else [])


def test_an_action_that_misses_a_checkpoint_of_another_run_is_saved_before(tmp_path: Path) -> None:
    """A `CheckpointError` need not be one of this run's checkpoints."""

    def read(run: fg.Run) -> None:
        load(tmp_path / "other", model=Counting)

    with pytest.raises(CheckpointError, match="other"):
        counting(tmp_path / "run", Act(fg.At(4), read), every=3)
    assert steps_in(tmp_path / "run") == [3, 4]
