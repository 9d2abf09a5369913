"""Programs composed at random of settings, plugins and data sources, with faults at random places.

Whatever the faults were, the program that is started again until it is done must leave what one
without them leaves.
"""

import errno
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, SaveError
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from fulgurite_rng import Rng
from hypothesis import strategies as st
from random_parts import EVALUATED, PARTS, ModelKind, make_model, parts, triggers

Place = Literal["batch", "evaluation batch", "log", "evaluate", "decide", "act", "save"]
Kind = Literal["kill", "terminate", "raise", "block", "full", "read-only"]
FILES = ("records.jsonl", "records.csv")
BATCHES = ("batch", "evaluation batch")
DISKS: dict[Kind, int] = {"full": errno.ENOSPC, "read-only": errno.EROFS}
"""Errors of a disk that takes nothing more for checkpoints, by the fault."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once.

    Attributes:
        kind: what happens: SIGKILL, SIGTERM, an exception, a source that never answers and then
            SIGTERM, or a disk that takes no checkpoints until the program is started again.
        place: where: when a batch is read, or in an action of this stage.
        step: the earliest step; it happens the first time that its place is come to from there on.
        delay: seconds from there to the signal.
    """

    kind: Kind
    place: Place
    step: int
    delay: float = 0.0


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        lengths: how many steps; the run is complete after each of them, and then lengthened.
        settings: of the engine.
        source: what kind of data source.
        prefetch: of training and evaluation.
        save_every: when checkpoints are saved.
        async_save: whether they are written in the background.
        own_directory: whether they have a directory of their own.
        is_engine_shared: whether all fits are of one engine, of which one failed to start before.
        evaluate: an evaluator for each trigger.
        model: kind of the model.
        parts: names of what takes part besides, and their triggers.
    """

    lengths: tuple[int, ...]
    settings: dict[str, Any]
    source: str
    prefetch: int
    save_every: fg.Trigger
    async_save: bool
    own_directory: bool
    is_engine_shared: bool
    evaluate: tuple[fg.Trigger, ...]
    model: ModelKind
    parts: tuple[tuple[str, fg.Trigger], ...]

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return self.lengths[-1]


@dataclass(frozen=True)
class Strike:
    """A fault that happened: which of a program's, and at which step."""

    index: int
    step: int


def note_strike(run_dir: Path, strike: Strike) -> None:
    """Note that a fault of a run directory happened."""
    with run_dir.with_suffix(".strikes").open("a") as file:
        print(json.dumps(asdict(strike)), file=file)


def read_strikes(run_dir: Path) -> list[Strike]:
    """Return what happened so far in the life of a run directory."""
    path = run_dir.with_suffix(".strikes")
    if not path.exists():
        return []
    return [Strike(**json.loads(line)) for line in path.read_text().splitlines()]


def disarm(run_dir: Path, faults: Sequence[Fault]) -> None:
    """Have none of the faults happen in a run directory, where all else is as with them: an action
    of stage `log` ends the window of the metrics, whatever it does."""
    for index in range(len(faults)):
        note_strike(run_dir, Strike(index, step=0))


class Disk:
    """Has this process write nothing below some directories, once it is broken."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.folders: tuple[str, ...] = ()
        sys.addaudithook(self.refuse)

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise the error of the disk where Python is about to change something."""
        if self.error is None:
            return
        changes = event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate")
        if event == "open":
            changes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not changes:
            return
        paths = [os.fspath(path) for path in arguments[:2] if isinstance(path, str | Path)]
        if any(path.startswith(self.folders) for path in paths):
            raise OSError(self.error, os.strerror(self.error), paths[0])


DISK = Disk()
"""That of this process: an audit hook cannot be removed."""


class Saboteur:
    """Has each fault happen once in the life of a run directory, and one in each process: before
    the action of its stage that has the record, or between two batches."""

    plugin_name = "saboteur"

    def __init__(self, faults: Sequence[Fault], run_dir: Path) -> None:
        self.faults = faults
        self.run_dir = run_dir
        self.struck = {strike.index for strike in read_strikes(run_dir)}
        self.step = 0
        # Batches are read on another thread than actions are run on; never released.
        self.has_struck = threading.Lock()
        self.timer: threading.Timer | None = None
        self.is_over = threading.Event()

    def come_to(self, place: str) -> None:
        """Have a fault happen if one is due at this place.

        Only one: a second signal to a process that stops for the first would end it at once.
        """
        for index, fault in enumerate(self.faults):
            is_due = fault.place == place and fault.step <= self.step and index not in self.struck
            if is_due and self.has_struck.acquire(blocking=False):
                self.strike(index)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Return an action for each stage, at the steps of faults: one at each step would keep
        steps from being fused."""
        steps = fg.At(*(fault.step for fault in self.faults))
        stages: list[Any] = [place for place in get_args(Place) if place not in BATCHES]
        return [
            fg.ScheduledAction(stage, steps, self.make_action(stage), stage) for stage in stages
        ]

    def make_action(self, stage: str) -> Callable[[fg.Run], None]:
        def act(run: fg.Run) -> None:
            self.step = run.step
            self.come_to(stage)

        return act

    def strike(self, index: int) -> None:
        """Have a fault happen, and note it before."""
        fault = self.faults[index]
        note_strike(self.run_dir, Strike(index, self.step))
        if fault.kind == "raise":
            raise OSError("the fault")
        if fault.kind in DISKS:
            DISK.folders = tuple(map(str, list_checkpoint_folders(self.run_dir)))
            DISK.error = DISKS[fault.kind]
            return
        if fault.kind == "block" and fault.place in BATCHES:
            self.send(signal.SIGTERM, delay=0.2)
            # On a thread of its own it is abandoned, and continues when the program is over.
            self.is_over.wait(99)
            return
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
        if fault.delay:
            self.send(number, fault.delay)
        else:
            os.kill(os.getpid(), number)

    def send(self, number: signal.Signals, delay: float) -> None:
        """Send a signal to this process after a delay in seconds."""
        self.timer = threading.Timer(delay, os.kill, (os.getpid(), number))
        self.timer.start()


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
    """Return that many examples in batches of 8, shuffled: `x` float32 (batch, 4), `y` int32."""
    x = np.random.default_rng(seed).normal(size=(size, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    return fg.ArrayData({"x": x, "y": labels}, 8, shuffle=True)


def list_checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return where the checkpoints of a program may be: in its run, or apart."""
    return [run_dir / "checkpoints", run_dir.with_suffix(".checkpoints")]


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
    source = kind(list(arrays), lambda: saboteur.come_to(place))
    resume: Any = "replay" if kind is Batches else None
    return fg.DataSource(source, prefetch=program.prefetch, resume=resume)


def make_plugins(program: Program, run_dir: Path, saboteur: Saboteur, held_out: Any) -> list[Any]:
    """Return the plugins of a program but those of its model.

    Args:
        program: the program.
        run_dir: its run directory.
        saboteur: what has the faults happen.
        held_out: the data of its evaluations.
    """
    directory = list_checkpoint_folders(run_dir)[1] if program.own_directory else None
    plugins: list[Any] = [
        saboteur,
        Rng(fg.RngStream("dropout")),
        JSONLLogger(),
        Checkpointer(program.save_every, directory=directory, async_save=program.async_save),
    ]
    for number, trigger in enumerate(program.evaluate):
        plugins.append(Evaluator(f"set{number}", held_out, every=trigger))
    for name, trigger in program.parts:
        plugins += PARTS[name](trigger, held_out)
    return plugins


def train(program: Program, run_dir: Path, faults: Sequence[Fault]) -> str:
    """Train, from what is in the run directory on; return a hash of the state and the metrics.

    Args:
        program: the program.
        run_dir: its run directory.
        faults: each happens once in the life of the directory.
    """
    saboteur = Saboteur(faults, run_dir)
    # What was complete once has no more fits of its length: the run may be longer by now.
    completed_file = run_dir.with_suffix(".completed")
    num_completed = len(completed_file.read_text().splitlines()) if completed_file.exists() else 0
    try:
        shared: fg.Engine | None = None
        result: fg.FitResult | None = None
        for steps in program.lengths[num_completed:] or program.lengths[-1:]:
            held_out = make_source(program, "evaluation batch", saboteur)
            model, model_plugins = make_model(program.model, held_out)
            if shared is None or not program.is_engine_shared:
                plugins = make_plugins(program, run_dir, saboteur, held_out)
                shared = fg.Engine(
                    run_dir=run_dir,
                    plugins=[*plugins, *model_plugins],
                    autoload=False,
                    # Longer than a checkpoint takes on a busy machine, or a save that works is given up.
                    stop_timeout=3.0,
                    **program.settings,
                )
                if program.is_engine_shared:
                    fail_to_start(shared, steps)
            source = make_source(program, "batch", saboteur)
            result = shared.fit(model, source, steps=steps, resume="auto")
            # Another reason is that of a plugin, with which the run is complete.
            if result.stop_reason == "SIGTERM":
                raise InterruptedError(result.stop_reason)
            with completed_file.open("a") as file:
                print(steps, file=file)
    finally:
        DISK.error = None
        if saboteur.timer is not None:
            saboteur.timer.join()
        saboteur.is_over.set()
    assert result is not None
    return hash_result(result)


class BrokenModel(fg.Module):
    """What cannot be made."""

    def __init__(self, *, key: Any) -> None:
        raise ValueError("no model")


def fail_to_start(engine: fg.Engine, steps: int) -> None:
    """Have a fit of an engine fail before its first step."""
    try:
        engine.fit(BrokenModel, make_arrays(8, 0), steps=steps, resume="auto")
    except ValueError as error:
        assert "no model" in str(error)
    else:
        raise AssertionError("a model that cannot be made was trained")


def hash_result(result: fg.FitResult) -> str:
    """Return a hash of the state and the metrics of a result."""
    digest = hashlib.sha256()
    for array in jax.tree.leaves(eqx.filter(result.state, eqx.is_array)):
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(array) if is_key else array).tobytes())
    digest.update(repr(sorted(result.history.to_dict().items())).encode())
    return digest.hexdigest()


def train_here(program: Program, run_dir: Path, faults: Sequence[Fault]) -> None:
    """Train in this process, and leave the hash in a file."""
    digest = train(program, run_dir, faults)
    unfinished = run_dir.with_suffix(".unfinished")
    unfinished.write_text(digest)
    unfinished.replace(run_dir.with_suffix(".digest"))


def do_nothing(number: int, frame: Any) -> None:
    """Handle a signal by nothing."""


def train_until_done(program: Program, run_dir: Path, faults: Sequence[Fault]) -> str:
    """Train in this process, again after each fault."""
    ends = []
    for _ in range(len(faults) + 1):
        # A batch made ahead may be one that nobody needs, and its signal come after the end.
        former = signal.signal(signal.SIGTERM, do_nothing)
        try:
            return train(program, run_dir, faults)
        except (InterruptedError, OSError, CheckpointError, SaveError) as error:
            if isinstance(error, CheckpointError | SaveError):
                assert get_disk_faults(faults), error
            elif not isinstance(error, InterruptedError) and "the fault" not in str(error):
                raise
            ends.append((repr(error), read_strikes(run_dir), time.monotonic()))
        finally:
            signal.signal(signal.SIGTERM, former)
    raise AssertionError(f"{program} was not done after {faults}: {ends}")


def get_disk_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Return those faults after which the disk takes no more checkpoints."""
    return [fault for fault in faults if fault.kind in DISKS]


def read_files(run_dir: Path) -> dict[str, bytes]:
    """Return the exact records by file."""
    return {name: (run_dir / name).read_bytes() for name in FILES if (run_dir / name).exists()}


@st.composite
def programs(draw: Any, max_steps: int) -> Program:
    """Draw a program of up to that many steps."""
    kind: ModelKind = draw(st.sampled_from(["net", "net", "net", "phased", "members"]))
    drawn = draw(parts(kind, max_size=5))
    policies = ["skip"] if "float16" in dict(drawn) else ["raise", "skip"]
    steps = draw(st.integers(max_steps // 4, max_steps))
    shorter = draw(st.one_of(st.none(), st.integers(1, steps - 1)))
    return Program(
        lengths=(steps,) if shorter is None else (shorter, steps),
        settings={
            "seed": draw(st.integers(0, 3)),
            "log_every": draw(st.integers(1, 7)),
            "steps_per_execution": draw(st.sampled_from(["auto", 1, 4])),
            "on_nonfinite": draw(st.sampled_from(policies)),
        },
        source=draw(st.sampled_from(["arrays", "stateful", "replayed"])),
        prefetch=draw(st.sampled_from([0, 2])),
        save_every=fg.Every(draw(st.integers(2, 9))) | draw(triggers()),
        async_save=draw(st.booleans()),
        own_directory=draw(st.booleans()),
        is_engine_shared=draw(st.booleans()),
        evaluate=tuple(draw(st.lists(triggers(), max_size=2))),
        model=kind,
        parts=drawn,
    )


@st.composite
def faulty_programs(
    draw: Any, kinds: Sequence[Kind], num_faults: int, max_steps: int
) -> tuple[Program, tuple[Fault, ...]]:
    """Draw a program and its faults.

    Their steps are evenly distributed over the program, which what hypothesis draws is not: it
    prefers small numbers.

    Args:
        kinds: of the faults.
        num_faults: how many.
        max_steps: of the program.
    """
    program = draw(programs(max_steps))
    chance: random.Random = draw(st.randoms(use_true_random=True))
    places: list[Place] = [
        place
        for place in get_args(Place)
        if (place != "batch" or program.source != "arrays")
        and (place != "evaluation batch" or has_evaluation_batches(program))
    ]
    faults: list[Fault] = []
    for _ in range(num_faults):
        kind = chance.choice(kinds)
        # Only a process that is killed may have ended when the signal comes.
        delay = chance.choice([0.0, chance.uniform(0.0, 0.05)]) if kind == "kill" else 0.0
        step = chance.randint(1, program.steps)
        faults.append(Fault(kind, chance.choice(places), step, delay))
    return program, tuple(faults)


def has_evaluation_batches(program: Program) -> bool:
    """Whether the program reads evaluation data of a source that tells of its batches."""
    names = {name for name, _ in program.parts}
    is_evaluated = bool(program.evaluate) or program.model == "members" or bool(names & EVALUATED)
    return is_evaluated and program.source != "arrays"
