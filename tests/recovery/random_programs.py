"""Programs composed at random of settings, plugins and data sources, with a fault at a random place.

Whatever the fault was, the program that is started again until it is done must leave what one
without it leaves.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from crash_program import Average, Net, Trend
from fulgurite_averaging import EMA, Average as AveragedWeights
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_logging import CSVLogger, JSONLLogger, NormMonitor
from fulgurite_optimizers import Freeze, GradientAccumulation, GradientClip
from fulgurite_rng import Rng
from fulgurite_stopping import EarlyStopping
from hypothesis import strategies as st

Place = Literal["batch", "evaluation batch", "log", "evaluate", "decide", "act", "save"]
Kind = Literal["kill", "terminate", "raise", "block"]
FILES = ("records.jsonl", "records.csv")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once.

    Attributes:
        kind: what happens: SIGKILL, SIGTERM, an exception, or a source that never answers and then
            SIGTERM.
        place: where: when a batch is read, or in an action of this stage.
        step: at which step, or how many batches a process has read before.
    """

    kind: Kind
    place: Place
    step: int


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        steps: how many.
        settings: of the engine.
        source: what kind of data source.
        prefetch: of training and evaluation.
        save_every: interval of checkpoints.
        async_save: whether they are written in the background.
        evaluate_every: an evaluator for each interval.
        plugins: names of what takes part besides.
    """

    steps: int
    settings: dict[str, Any]
    source: str
    prefetch: int
    save_every: int
    async_save: bool
    evaluate_every: tuple[int, ...]
    plugins: tuple[str, ...]


class Saboteur:
    """Has a fault happen, once in the life of a run directory; before the action of its stage that
    has the record, or between two batches."""

    plugin_name = "saboteur"

    def __init__(self, fault: Fault | None, marker: Path) -> None:
        self.fault = fault
        self.marker = marker
        self.num_batches = {"batch": 0, "evaluation batch": 0}

    def count_batch(self, place: str) -> None:
        """Note that a batch is read in this process."""
        self.num_batches[place] += 1
        fault = self.fault
        if fault is not None and fault.place == place and self.num_batches[place] > fault.step:
            self.strike()

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Return an action for each stage, which does nothing but at the fault's step."""
        return [
            fg.ScheduledAction(stage, 1, self.make_action(stage), stage)
            for stage in ("log", "evaluate", "decide", "act", "save")
        ]

    def make_action(self, stage: str) -> Callable[[fg.Run], None]:
        def act(run: fg.Run) -> None:
            fault = self.fault
            if fault is not None and fault.place == stage and fault.step == run.step:
                self.strike()

        return act

    def strike(self) -> None:
        """Do it, unless it was done."""
        assert self.fault is not None
        if self.marker.exists():
            return
        self.marker.touch()
        if self.fault.kind == "raise":
            raise OSError("the fault")
        if self.fault.kind == "block" and self.fault.place in self.num_batches:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(99)
        number = signal.SIGKILL if self.fault.kind == "kill" else signal.SIGTERM
        os.kill(os.getpid(), number)


@dataclass(eq=False)
class Tally:
    """Counts its evaluations on the host before it runs them, and says so after."""

    every: int
    data: Any
    num_begun: int = 0
    plugin_name: str = field(default="tally", init=False)

    @fg.hookimpl
    def register_evaluators(self) -> list[fg.Evaluator]:
        return [fg.Evaluator("tallied", self.data)]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("count", self.every, self.count, "evaluate")]

    def count(self, run: fg.Run) -> None:
        self.num_begun += 1
        run.evaluate("tallied")
        run.log_scalars("tally", {"begun": self.num_begun})

    @fg.hookimpl
    def get_host_state(self) -> int:
        return self.num_begun

    @fg.hookimpl
    def set_host_state(self, state: int, version: int) -> None:
        self.num_begun = state


class Batches:
    """Batches in a list's order; tells the saboteur of each."""

    def __init__(self, batches: list[Any], note: Callable[[], None]) -> None:
        self.batches = batches
        self.note = note

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.note()
            yield batch


class StatefulBatches(Batches):
    """The same, which can be put back to a position."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.note()
            self.position += 1
            yield self.batches[self.position - 1]

    def get_state(self) -> int:
        return self.position

    def set_state(self, state: int) -> None:
        self.position = state


def make_arrays(size: int, seed: int) -> fg.ArrayData:
    """Return so many examples in batches of 8, shuffled: `x` float32 (batch, 4), `y` int32."""
    x = np.random.default_rng(seed).normal(size=(size, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    return fg.ArrayData({"x": x, "y": labels}, 8, shuffle=True)


def make_source(program: Program, place: str, saboteur: Saboteur) -> Any:
    """Return the data of a program, for training or an evaluation.

    Args:
        program: the program.
        place: `batch` or `evaluation batch`.
        saboteur: told of each batch.
    """
    seed = 0 if place == "batch" else 1
    arrays = make_arrays(56 if place == "batch" else 24, seed)
    if program.source == "arrays":
        return arrays
    kind = StatefulBatches if program.source == "stateful" and place == "batch" else Batches
    source = kind(list(arrays), lambda: saboteur.count_batch(place))
    resume: Any = "replay" if kind is Batches else None
    return fg.DataSource(source, prefetch=program.prefetch, resume=resume)


PLUGINS: dict[str, Callable[[Any], Any]] = {
    "accumulation": lambda _: GradientAccumulation(2),
    "averaged": lambda _: AveragedWeights(EMA(0.9)),
    "average": lambda _: Average(),
    "clip": lambda _: GradientClip(max_norm=1.0),
    "csv": lambda _: CSVLogger(),
    "freeze": lambda _: Freeze("first.bias", since=3, until=11),
    "norms": lambda _: NormMonitor(),
    "stopping": lambda _: EarlyStopping("train/loss", patience=30),
    "tally": lambda data: Tally(5, data),
    "trend": lambda _: Trend(),
}
"""What takes part besides, made from the data of an evaluation."""


def train(program: Program, run_dir: Path, fault: Fault | None) -> str:
    """Train, from what is in the run directory on; return a hash of the state and the metrics.

    Args:
        program: the program.
        run_dir: its run directory.
        fault: happens once in the life of the directory.
    """
    saboteur = Saboteur(fault, run_dir.with_suffix(".struck"))
    held_out = make_source(program, "evaluation batch", saboteur)
    plugins: list[Any] = [
        saboteur,
        Rng(fg.RngStream("dropout")),
        JSONLLogger(),
        Checkpointer(program.save_every, async_save=program.async_save),
        *[PLUGINS[name](held_out) for name in program.plugins],
    ]
    for number, every in enumerate(program.evaluate_every):
        plugins.append(Evaluator(f"set{number}", held_out, every=every))
    engine = fg.Engine(
        steps=program.steps,
        run_dir=run_dir,
        plugins=plugins,
        autoload=False,
        stop_timeout=0.5,
        **program.settings,
    )
    model = eqx.nn.make_with_state(Net)
    result = engine.fit(model, make_source(program, "batch", saboteur), resume="auto")
    if result.stop_reason is not None:
        raise InterruptedError(result.stop_reason)
    digest = hashlib.sha256()
    for array in jax.tree.leaves(eqx.filter(result.state, eqx.is_array)):
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(array) if is_key else array).tobytes())
    digest.update(repr(sorted(result.history.to_dict().items())).encode())
    return digest.hexdigest()


def train_until_done(program: Program, run_dir: Path, fault: Fault) -> str:
    """Train in this process, again after each fault."""
    for _ in range(3):
        try:
            return train(program, run_dir, fault)
        except (InterruptedError, OSError) as error:
            if not isinstance(error, InterruptedError) and "the fault" not in str(error):
                raise
    raise AssertionError(f"{program} with {fault} was not done after three starts")


def read_files(run_dir: Path) -> dict[str, bytes]:
    """Return the exact records by file."""
    return {name: (run_dir / name).read_bytes() for name in FILES if (run_dir / name).exists()}


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program."""
    return Program(
        steps=draw(st.integers(6, 24)),
        settings={
            "seed": draw(st.integers(0, 3)),
            "log_every": draw(st.integers(1, 7)),
            "steps_per_execution": draw(st.sampled_from(["auto", 1, 4])),
        },
        source=draw(st.sampled_from(["arrays", "stateful", "replayed"])),
        prefetch=draw(st.sampled_from([0, 2])),
        save_every=draw(st.integers(2, 9)),
        async_save=draw(st.booleans()),
        evaluate_every=tuple(draw(st.lists(st.integers(2, 9), max_size=2))),
        plugins=tuple(draw(st.lists(st.sampled_from(sorted(PLUGINS)), unique=True, max_size=4))),
    )


def faults(*kinds: Kind) -> st.SearchStrategy[Fault]:
    """Return a strategy for faults of these kinds."""
    return st.builds(
        Fault,
        kind=st.sampled_from(kinds),
        place=st.sampled_from(get_args(Place)),
        step=st.integers(1, 22),
    )
