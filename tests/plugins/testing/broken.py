"""A plugin that passes, and one for each check that does not pass it."""

import random
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite_logging import FileLogger


@dataclass
class Sound:
    """Has something of everything: a slice, host state, actions, records, a random number of its
    own."""

    decay: float = 0.9
    looked: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"Sound: decay is {self.decay!r}; it is a number from 0 to 1")

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> Any:
        return {"steps": jnp.zeros(()), "drawn": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        drawn = self.decay * plugin_state["drawn"] + (1 - self.decay) * jax.random.uniform(
            ctx.key()
        )
        return module, {"steps": plugin_state["steps"] + 1, "drawn": drawn}

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.looked += 1
        run.log_scalars("sound", {"looked": self.looked})

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        if not run.is_resumed:
            self.looked = 0

    @fg.hookimpl
    def get_host_state(self) -> int:
        return self.looked

    @fg.hookimpl
    def set_host_state(self, state: int) -> None:
        self.looked = state


class NeverBeginsAnew(Sound):
    """Counts on in the next fit."""

    plugin_name = "sound"

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...


class ForgetsAtTheEndOnly(Sound):
    """Begins with what is left of a fit that has not come to its end."""

    plugin_name = "sound"

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...

    @fg.hookimpl
    def on_fit_end(self) -> None:
        self.looked = 0


class CountsInItsClass(Sound):
    """Has one count for all instances."""

    plugin_name = "sound"
    count = 0

    def look(self, run: fg.Run) -> None:
        type(self).count += 1
        run.log_scalars("sound", {"looked": self.count})

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        type(self).count = 0


class Misspelt:
    @fg.hookimpl
    def on_fit_starts(self, run: fg.Run) -> None: ...


class WrongAnswer:
    @fg.hookimpl
    def register_actions(self) -> Any:
        return {"every": 3}


class TakesAnything:
    def __init__(self, **options: Any) -> None:
        self.options = options

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...


@dataclass
class Unchecked:
    every: Any = 3

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...


@dataclass
class NeedsStrength:
    """Is not a broken plugin; its first argument has no default."""

    strength: float
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"NeedsStrength: every is {self.every}; it must be positive")

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...


class CountsTraces:
    traces = 0

    @fg.hookimpl
    def loss_terms(self, module: Any) -> dict[str, jax.Array]:
        self.traces += 1
        return {"traces": jnp.float32(self.traces)}


class KeepsTracer:
    tracer: Any = None

    @fg.hookimpl
    def step_metrics(self, output: fg.Output) -> dict[str, Any]:
        self.tracer = output.loss
        return {}


class Prints:
    @fg.hookimpl
    def step_metrics(self, output: fg.Output) -> dict[str, Any]:
        jax.debug.callback(lambda loss: None, output.loss)
        return {}


class Captures:
    changes_results = True

    def __init__(self) -> None:
        self.weights = jnp.arange(2048.0)

    @fg.hookimpl
    def step_metrics(self, output: fg.Output) -> dict[str, Any]:
        return {
            "sum": fg.metrics.LastValue.from_values(
                jnp.sum(self.weights) * jnp.asarray(output.loss)
            )
        }


class FailsAsLogger:
    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        raise OSError("no space left")


class LogsUnwritableNames:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("log", 2, self.log)]

    def log(self, run: fg.Run) -> None:
        run.log_scalars("names", {"$x": 1.0, "plain": 1.0})


class TakesOverStream:
    @fg.hookimpl
    def register_rng_streams(self) -> list[fg.RngStream]:
        return [fg.RngStream("default", train=True, per_step=False)]


class ChangesWeights:
    """In silence, by an action."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("shrink", 2, self.shrink)]

    def shrink(self, run: fg.Run) -> fg.ReplaceState:
        state = run.state
        smaller = jax.tree.map(
            lambda leaf: leaf * 0.5 if isinstance(leaf, jax.Array) else leaf, state.module
        )
        return fg.ReplaceState(state.replace(module=smaller))


class TellsTheTime:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "tell", 2, lambda run: run.log_scalars("clock", {"wall": time.time_ns()})
            )
        ]


class SaysTheTime:
    """As `TellsTheTime`, in words."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "say", 2, lambda run: run.log_text("clock", {"wall": f"it is {time.time_ns()}"})
            )
        ]


class CanBeCalled:
    """A plugin whose instances are callable, as those of many Equinox modules are."""

    @fg.hookimpl
    def on_fit_start(self) -> None: ...

    def __call__(self, value: Any) -> Any:
        return value


class Draws:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "draw", 2, lambda run: run.log_scalars("drawn", {"number": random.random()})
            )
        ]


class Forgets:
    """Counts on the host, and keeps the count nowhere."""

    looked = 0

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.looked += 1
        run.log_scalars("forgets", {"looked": self.looked})


class SortsWhatItKeeps:
    """Keeps an object of JSON, whose members have no order."""

    counts = fg.PerFit[dict[str, int]](dict)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.counts[str(9 - run.step)] = run.step

    @fg.hookimpl
    def get_host_state(self) -> dict[str, int]:
        return dict(self.counts)

    @fg.hookimpl
    def set_host_state(self, state: dict[str, int]) -> None:
        self.counts = dict(sorted(state.items()))


class ForgetsInWords:
    """As `Forgets`, and logs the count in words."""

    count = fg.PerFit(int)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.count += 1
        run.log_text("forgets", {"looked": f"{self.count} times"})


class CountsOutsideOfItsState:
    """Counts in a field that is in no host state, which the engine cannot put back."""

    def __init__(self) -> None:
        self.num_calls = 0

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("count", 3, self.count)]

    def count(self, run: fg.Run) -> None:
        self.num_calls += 1
        run.log_scalars("counts", {"count": self.num_calls})


class AppendsBeforeItLogs:
    """Appends to a file before it logs, and again when it is done again."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("append", 3, self.append)]

    def append(self, run: fg.Run) -> None:
        with (run.run_dir.path / "steps.txt").open("a") as file:
            file.write(f"{run.step}\n")
        run.log_scalars("appends", {"step": run.step})


class WritesOn:
    """Appends to its file whatever a resumed run continues from."""

    @fg.hookimpl
    def open_logger(self, run: fg.LoggedRun) -> None:
        assert run.run_dir is not None
        self.file = (run.run_dir.path / "losses.txt").open("a")

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        if record.stream == "exact":
            self.file.write(f"{record.step} {record.values}\n")

    @fg.hookimpl
    def close_logger(self) -> None:
        self.file.close()


@dataclass(eq=False)
class TellsAnOldPlace(FileLogger):
    """Cuts its file back, and says that it is as long as before until something is written."""

    plugin_name = "old"

    def open_backend(self, run: fg.LoggedRun, position: Any) -> Any:
        assert run.run_dir is not None
        return OldPlace(run.run_dir.path / "losses.txt", position or 0)


class OldPlace:
    def __init__(self, path: Path, position: int) -> None:
        self.file = path.open("ab")
        self.file.truncate(position)

    def write(self, record: fg.Record) -> None:
        if record.stream == "exact":
            self.file.write(f"{record.step} {record.values}\n".encode())

    def sync(self) -> None:
        self.file.flush()

    def get_position(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


class Locked:
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @fg.hookimpl
    def on_fit_end(self) -> None: ...


@dataclass(eq=False)
class WritesADatabase(FileLogger):
    """Sound, though the bytes of its file tell how often it was opened."""

    plugin_name = "database"

    def open_backend(self, run: fg.LoggedRun, position: Any) -> Any:
        assert run.run_dir is not None
        return Database(run.run_dir.path / "losses.db", position or 0)


class Database:
    def __init__(self, path: Path, position: int) -> None:
        self.database, self.rows = sqlite3.connect(path, check_same_thread=False), position
        self.database.execute("create table if not exists losses (step integer, loss real)")
        self.database.execute("delete from losses where rowid > ?", (position,))

    def write(self, record: fg.Record) -> None:
        if record.stream == "exact":
            self.database.execute(
                "insert into losses values (?, ?)", (record.step, record.values["loss"])
            )
            self.rows += 1

    def sync(self) -> None:
        self.database.commit()

    def get_position(self) -> int:
        return self.rows

    def close(self) -> None:
        self.database.commit()
        self.database.close()


class NoJson:
    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"best": np.float32(1)}

    @fg.hookimpl
    def set_host_state(self, state: Any) -> None: ...


class KeepsTooMuch:
    @fg.hookimpl
    def get_host_state(self) -> Any:
        return {"seen": "x" * (65 * 2**20)}

    @fg.hookimpl
    def set_host_state(self, state: Any) -> None: ...


class RestoresNothing:
    count = 0

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        self.count = 1

    @fg.hookimpl
    def get_host_state(self) -> Any:
        return self.count

    @fg.hookimpl
    def set_host_state(self, state: Any) -> None: ...


class AsksForFuse:
    """Looks at how many steps are in a dispatch."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction(
                "tell",
                2,
                lambda run: run.log_scalars("fuse", {"steps": run.engine.steps_per_execution}),
            )
        ]


class ReadsByAsarray:
    newest: Any = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("read", 1, self.read)]

    def read(self, run: fg.Run) -> None:
        np.asarray(jax.tree.leaves(run.state.module)[0])


class ReadsByFloat:
    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "scalars":
            return
        for array in jax.live_arrays():
            if jnp.issubdtype(array.dtype, jnp.floating):
                float(jnp.sum(array))


class NeverCloses:
    @fg.hookimpl
    def close_logger(self) -> None:
        threading.Event().wait()


class LeavesThread:
    def __init__(self) -> None:
        self.over = threading.Event()

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        threading.Thread(target=self.over.wait, args=(60,), name="left-behind").start()


class WritesFromAll:
    """Each process makes the same file."""

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        assert run.run_dir is not None
        with (run.run_dir.path / "mine.txt").open("x") as file:
            file.write("mine")
