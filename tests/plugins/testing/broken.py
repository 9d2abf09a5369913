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


@dataclass
class Sound:
    """Has something of everything: a slice, host state, actions, records, a random number of its own."""

    decay: float = 0.9
    looked: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"Sound: decay is {self.decay!r}; it is a number from 0 to 1")

    @fg.hookimpl
    def plugin_state(self, module: Any) -> Any:
        return {"steps": jnp.zeros(()), "drawn": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Any, own: Any, ctx: fg.Context) -> Any:
        drawn = self.decay * own["drawn"] + (1 - self.decay) * jax.random.uniform(ctx.key())
        return module, {"steps": own["steps"] + 1, "drawn": drawn}

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.looked += 1
        run.emit("scalars", "sound", {"looked": self.looked})

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        if not run.resumed:
            self.looked = 0

    @fg.hookimpl
    def host_state(self) -> int:
        return self.looked

    @fg.hookimpl
    def restore_host_state(self, state: int) -> None:
        self.looked = state


class NeverBeginsAnew(Sound):
    """Counts on in the next fit."""

    plugin_name = "sound"

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None: ...


class Misspelt:
    @fg.hookimpl
    def on_fit_starts(self, run: fg.Run) -> None: ...


class WrongAnswer:
    @fg.hookimpl
    def schedule(self) -> Any:
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


class CountsTraces:
    traces = 0

    @fg.hookimpl
    def loss_terms(self, module: Any) -> dict[str, jax.Array]:
        self.traces += 1
        return {"traces": jnp.float32(self.traces)}


class KeepsTracer:
    kept: Any = None

    @fg.hookimpl
    def step_metrics(self, output: fg.Output) -> dict[str, Any]:
        self.kept = output.loss
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
        return {"sum": fg.metrics.Last.of(jnp.sum(self.weights) * jnp.asarray(output.loss))}


class FailsAsSink:
    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        raise OSError("no space left")


class TakesOverStream:
    @fg.hookimpl
    def rng_streams(self) -> list[fg.Stream]:
        return [fg.Stream("default", train=True, per_step=False)]


class ChangesWeights:
    """In silence, by an action."""

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("shrink", 2, self.shrink)]

    def shrink(self, run: fg.Run) -> fg.Replace:
        state = run.state
        smaller = jax.tree.map(lambda one: one * 0.5 if isinstance(one, jax.Array) else one, state.module)
        return fg.Replace(state.replace(module=smaller))


class TellsTheTime:
    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("tell", 2, lambda run: run.emit("scalars", "clock", {"wall": time.time_ns()}))]


class Draws:
    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("draw", 2, lambda run: run.emit("scalars", "drawn", {"number": random.random()}))]


class Forgets:
    """Counts on the host, and keeps the count nowhere."""

    looked = 0

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("look", 3, self.look)]

    def look(self, run: fg.Run) -> None:
        self.looked += 1
        run.emit("scalars", "forgets", {"looked": self.looked})


class WritesOn:
    """Appends to its file whatever a resumed run goes on from."""

    @fg.hookimpl
    def open_log(self, run: fg.Run) -> None:
        assert run.directory is not None
        self.file = (run.directory.path / "losses.txt").open("a")

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        if record.stream == "exact":
            self.file.write(f"{record.step} {record.values}\n")

    @fg.hookimpl
    def close_log(self) -> None:
        self.file.close()


@dataclass(eq=False)
class TellsAnOldPlace(fg.FileSink):
    """Cuts its file back, and says that it is as long as before until something is written."""

    plugin_name = "old"

    def backend(self, run: fg.Run, position: Any) -> Any:
        assert run.directory is not None
        return OldPlace(run.directory.path / "losses.txt", position or 0)


class OldPlace:
    def __init__(self, path: Path, position: int) -> None:
        self.file = path.open("ab")
        self.file.truncate(position)

    def write(self, record: fg.Record) -> None:
        if record.stream == "exact":
            self.file.write(f"{record.step} {record.values}\n".encode())

    def sync(self) -> None:
        self.file.flush()

    def position(self) -> int:
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
class WritesADatabase(fg.FileSink):
    """Sound, though the bytes of its file tell how often it was opened."""

    plugin_name = "database"

    def backend(self, run: fg.Run, position: Any) -> Any:
        assert run.directory is not None
        return Database(run.directory.path / "losses.db", position or 0)


class Database:
    def __init__(self, path: Path, position: int) -> None:
        self.database, self.rows = sqlite3.connect(path, check_same_thread=False), position
        self.database.execute("create table if not exists losses (step integer, loss real)")
        self.database.execute("delete from losses where rowid > ?", (position,))

    def write(self, record: fg.Record) -> None:
        if record.stream == "exact":
            self.database.execute("insert into losses values (?, ?)", (record.step, record.values["loss"]))
            self.rows += 1

    def sync(self) -> None:
        self.database.commit()

    def position(self) -> int:
        return self.rows

    def close(self) -> None:
        self.database.commit()
        self.database.close()


class NoJson:
    @fg.hookimpl
    def host_state(self) -> Any:
        return {"best": np.float32(1)}

    @fg.hookimpl
    def restore_host_state(self, state: Any) -> None: ...


class RestoresNothing:
    seen = 0

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        self.seen = 1

    @fg.hookimpl
    def host_state(self) -> Any:
        return self.seen

    @fg.hookimpl
    def restore_host_state(self, state: Any) -> None: ...


class AsksForFuse:
    """Looks at how many steps are in a dispatch."""

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("tell", 2, lambda run: run.emit("scalars", "fuse", {"steps": run.engine.fuse}))]


class ReadsByAsarray:
    newest: Any = None

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("read", 1, self.read)]

    def read(self, run: fg.Run) -> None:
        np.asarray(jax.tree.leaves(run.state.module)[0])


class ReadsByFloat:
    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        for one in jax.live_arrays():
            if jnp.issubdtype(one.dtype, jnp.floating):
                float(jnp.sum(one))


class NeverCloses:
    @fg.hookimpl
    def close_log(self) -> None:
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
        assert run.directory is not None
        with (run.directory.path / "mine.txt").open("x") as file:
            file.write("mine")
