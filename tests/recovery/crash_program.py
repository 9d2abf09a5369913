"""A program with everything that makes it hard to continue where a run was killed; it can kill itself
at a given place.

Shuffled data, dropout, BatchNorm, Adam, a moving average and a random draw in plugin state, a count
on the host, step triggers, `EvenlySpaced`, `AtStart`, `AtEnd`, batches made ahead by a thread,
fused steps, evaluations, saves by step and by the clock.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_cli
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger, LogBackend
from fulgurite_rng import Rng


class Net(fg.Module):
    """Two layers with normalization and dropout between them."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first_key, last_key = jax.random.split(key)
        self.first, self.last = (
            eqx.nn.Linear(4, 8, key=first_key),
            eqx.nn.Linear(8, 3, key=last_key),
        )
        self.norm, self.drop = eqx.nn.BatchNorm(8, "batch", mode="ema"), eqx.nn.Dropout(0.3)

    def __call__(self, x: Any, state: eqx.nn.State, key: Any) -> tuple[Any, eqx.nn.State]:
        x, state = self.norm(self.first(x), state)
        return self.last(self.drop(jax.nn.relu(x), key=key)), state

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        keys, state = ctx.keys("dropout", len(batch["y"])), ctx.model_state
        assert state is not None
        apply = jax.vmap(self, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, state = apply(batch["x"], state, keys)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        metrics = {
            "accuracy": fg.metrics.Accuracy.from_logits(logits, batch["y"]),
            "last": fg.metrics.LastValue.from_values(loss),
        }
        return fg.Output(loss, metrics=metrics, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@dataclass(frozen=True)
class Average:
    """A moving average of the weights, and a number drawn at each step."""

    @fg.hookimpl
    def init_plugin_state(self, module: Net) -> Any:
        return {"average": eqx.filter(module, eqx.is_inexact_array), "drawn": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Net, plugin_state: Any, ctx: fg.Context) -> Any:
        weights = eqx.filter(module, eqx.is_inexact_array)
        average = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new, plugin_state["average"], weights
        )
        return module, {"average": average, "drawn": jax.random.uniform(ctx.key())}


@dataclass(eq=False)
class Counter:
    """Counts on the host how often it was called, and says so; makes every fifth step a little
    slower."""

    times: int
    count: int = 0

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("tell", fg.EvenlySpaced(self.times), self.tell),
            fg.ScheduledAction(
                "begin", fg.AtStart(), lambda run: run.log_text("counter", {"begun": str(run.step)})
            ),
            fg.ScheduledAction("pace", 5, lambda run: time.sleep(0.01)),
        ]

    def tell(self, run: fg.Run) -> None:
        self.count += 1
        run.log_text("counter", {"count": str(self.count)})

    @fg.hookimpl
    def get_host_state(self) -> int:
        return self.count

    @fg.hookimpl
    def set_host_state(self, state: int) -> None:
        self.count = state


@dataclass(frozen=True)
class Trend:
    """Decides on the last five windows: the weights become a little smaller where the loss did not
    fall. After a kill it must see the windows from before it."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("decide", 7, self.decide, "decide")]

    def decide(self, run: fg.Run) -> fg.ReplaceState | None:
        if "train/loss" not in run.history:
            return None
        losses = run.history["train/loss"][-5:]
        if losses[-1] < losses.mean():
            return None
        weights, rest = eqx.partition(run.state.module, eqx.is_inexact_array)
        weights = jax.tree.map(lambda leaf: leaf * (1 - 1e-3 * len(losses)), weights)
        run.log_text("trend", {"shrunk": f"over {len(losses)} windows"})
        return fg.ReplaceState(run.state.replace(module=eqx.combine(weights, rest)))


@dataclass(eq=False)
class Killer:
    """Sends `number` to its own process, `wait` seconds after the `count`-th `place` of this
    process."""

    place: str
    count: int
    wait: float
    number: int
    _num_calls: int = field(default=0, init=False)

    def at(self, place: str) -> None:
        self._num_calls += place == self.place
        if place == self.place and self._num_calls == self.count:
            if self.wait:
                threading.Timer(self.wait, os.kill, (os.getpid(), self.number)).start()
            else:
                os.kill(os.getpid(), self.number)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "kill", fg.At(self.count), lambda run: os.kill(os.getpid(), self.number)
            )
        ] * (self.place == "step")

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        self.at("record")

    @fg.hookimpl
    def on_save(self, run: fg.Run) -> None:
        self.at("save")


@dataclass(eq=False)
class Telling:
    """A source that calls `tell` for each of its batches. It can be continued in the middle of
    an epoch only if `stateful`, otherwise it is read from the start of the epoch again."""

    source: fg.ArrayData
    tell: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            self.tell()
            yield batch


@dataclass(eq=False)
class Stream(Telling):
    """The same with a state: the number of batches given so far."""

    num_drawn: int = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, start = divmod(self.num_drawn, len(self.source))
        for batch in self.source.iter_epoch(epoch, seed=5, start=start):
            self.tell()
            self.num_drawn += 1
            yield batch

    def get_state(self) -> int:
        return self.num_drawn

    def set_state(self, state: int) -> None:
        self.num_drawn = state


def examples(count: int, seed: int, batch_size: int, **options: Any) -> fg.ArrayData:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return fg.ArrayData(
        {"x": x, "y": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)}, batch_size, **options
    )


SOURCES: dict[str, Callable[[Callable[[], None]], Any]] = {
    "arrays": lambda tell: examples(100, 1, 16, shuffle=True),
    "ahead": lambda tell: fg.DataSource(examples(96, 1, 16, shuffle=True), prefetch=3),
    "replayed": lambda tell: fg.DataSource(
        Telling(examples(96, 1, 16, shuffle=True), tell), prefetch=2, resume="replay"
    ),
    "stream": lambda tell: fg.DataSource(
        Stream(examples(112, 1, 16, shuffle=True), tell), prefetch=3
    ),
}


def experiment(
    steps: int = 100,
    steps_per_execution: int = 1,
    source: str = "arrays",
    log: int = 4,
    evaluate: int = 14,
    times: int = 9,
    save: int = 15,
    period: float = 1e9,
    async_save: bool = True,
    delay: float = 0.0,
    place: str = "nowhere",
    count: int = 1,
    after: float = 0.0,
    number: int = signal.SIGKILL,
) -> Experiment:
    """The program; it kills itself as `place`, `count`, `after` and `number` say; `delay` is for
    each record written, in seconds."""
    killer = Killer(place, count, after, number)
    test = Telling(examples(48, 2, 16), lambda: killer.at("evaluation"))
    plugins = [
        Rng(),
        Average(),
        Trend(),
        Counter(times),
        Evaluator(
            "test",
            fg.DataSource(test, prefetch=0),
            every=fg.AtStart() | fg.Every(evaluate) | fg.AtEnd(),
        ),
        JSONLLogger() if delay == 0 else Delayed(delay),
        killer,
        Checkpointer(
            every=fg.Every(save) | fg.EverySeconds(period),
            async_save=async_save,
        ),
    ]
    engine = fg.Engine(
        steps=steps,
        seed=7,
        steps_per_execution=steps_per_execution,
        log_every=log,
        plugins=plugins,
        autoload=False,
    )
    return Experiment(
        engine, eqx.nn.make_with_state(Net), SOURCES[source](lambda: killer.at("batch"))
    )


class Delayed(JSONLLogger):
    """Writes after a while."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay = delay

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        backend = super().open_backend(run, position)
        write = backend.write

        def delayed(record: fg.Record) -> None:
            if record.stream == "exact":
                time.sleep(self.delay)
            write(record)

        backend.write = delayed  # type: ignore[method-assign]
        return backend


def main(run: str, arguments: list[str]) -> None:
    """Trains in `run`; at the end `final.npz` there holds every array of the state. A warning ends
    it: nothing that was saved may turn out to be damaged."""
    warnings.simplefilter("error")
    warnings.filterwarnings("default", "Error (reading|writing) persistent compilation cache")
    warnings.filterwarnings("default", category=DeprecationWarning)
    killing = r"(the argument (after|count|delay|number|place) was [^;]*(; )?)+$"
    warnings.filterwarnings("default", rf"resuming from \S+ may not be exact: {killing}")
    result = fulgurite_cli.run(experiment, [*arguments, "--run", run])
    arrays = {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            eqx.filter(result.state, eqx.is_array)
        )
    }
    with open(Path(run, "final.partial"), "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    Path(run, "final.partial").rename(Path(run, "final.npz"))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
