"""What loggers cost training: the same small fit with each logger, logging every 10 steps, against one
with none.

    none                        the default Engine, autoload off
    jsonl, csv, console, ...    the same with one logger; console lines go to /dev/null, the
                                progress line is drawn
    all                         with all of them

Timed are the steps from `OPENED` on until the last one is done and all that was logged is written,
as the future of `flush` of a writer tells. What loggers do once a run is left out of the ratios:
opening files, `wandb.init`, the tables of the progress display, closing. It is measured apart,
as the seconds by which a whole fit takes longer than one without loggers, its timed steps not
counted. What else a machine does only adds to a time, often by more than is looked for here, so the
fastest fit of each arm is compared as well.

Arms whose plugin is not installed are left out. `slow` is a logger whose disk takes a second a
record: its fit may take no longer until training has ended, so its records are not waited for.

python tests/bench/loggers.py --json loggers.json
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from time import perf_counter
from typing import Any

import fulgurite as fg
import jax
from fulgurite_logging import FileLogger, LogBackend
from harness import Spread, arguments, interleaved, ratio, show, write
from workloads import WORKLOADS, Trained, copy_arrays

LOGGERS: dict[str, list[Any]] = {
    "none": [],
    "jsonl": ["jsonl"],
    "csv": ["csv"],
    "console": ["console"],
    "tensorboard": ["tensorboard"],
    "wandb": [{"wandb": {"project": "bench", "mode": "offline"}}],
    "progress": ["progress"],
}
# A run directory that no plugin writes to is an error.
WITHOUT_FILES = ("none", "console", "progress")
# 400 rows of two records: fewer than the queue of `slow` holds.
OPENED, STEPS = 100, 4100


class Slow(FileLogger):
    """Writes nothing until it is released, as a disk would that takes a second for each record."""

    plugin_name = "slow"
    release = threading.Event()

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        return _Waiting(self.release)


@dataclass
class _Waiting:
    release: threading.Event

    def write(self, record: fg.Record) -> None:
        self.release.wait(1.0)

    def sync(self) -> None: ...

    def get_position(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Timed:
    """Notes when the loggers are open and when all is trained and written; then lets slow loggers
    go."""

    at: list[float] = field(default_factory=list)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("begin", fg.At(OPENED), self.note),
            fg.ScheduledAction("end", fg.AtEnd(), self.end),
        ]

    def note(self, run: fg.Run) -> None:
        jax.block_until_ready(run.state.module)
        plugins = [
            logger.plugin
            for logger in run.engine.plugins.plugins.values()
            if not isinstance(logger.plugin, Slow)
        ]
        for future in [
            logger._writer.flush()
            for logger in plugins
            if getattr(logger, "_writer", None) is not None
        ]:
            future.result(60)
        self.at.append(perf_counter())

    def end(self, run: fg.Run) -> None:
        self.note(run)
        Slow.release.set()


def main() -> None:
    options = arguments(__doc__, repeats=9).parse_args()
    installed = {entry.name for entry in entry_points(group="fulgurite.plugins")}
    names = [name for name in LOGGERS if name in installed or name == "none"]
    print(f"left out: {', '.join(sorted(LOGGERS.keys() - set(names))) or 'nothing'}")
    plugins = {name: LOGGERS[name] for name in names} | {
        "all": [plugin for name in names for plugin in LOGGERS[name]]
    }
    with tempfile.TemporaryDirectory() as folder, quiet():
        arms = {
            name: Arm([*chosen], None if name in WITHOUT_FILES else Path(folder) / name)
            for name, chosen in {**plugins, "slow": [Slow()]}.items()
        }
        steps = interleaved(arms, options.repeats)
    once = {
        name: [a - b for a, b in zip(arms[name].once, arms["none"].once, strict=True)]
        for name in arms
    }
    ratios = {name: ratio(steps, name, "none") for name in arms if name != "none"}
    seconds = {
        name: Spread.of(values) for name, values in once.items() if name not in ("none", "slow")
    }
    show("time of the steps over that without loggers", ratios)
    fastest = {name: Spread.of([min(steps[name]) / min(steps["none"])]) for name in ratios}
    show("the same, fastest fit over fastest fit", fastest)
    show("seconds once a run: opening and closing", seconds)
    show(
        "milliseconds a step",
        {"none": Spread.of([1e3 * seconds / (STEPS - OPENED) for seconds in steps["none"]])},
    )
    if options.json:
        write(options.json, ratios, fastest=fastest, seconds_once=seconds)


class Arm:
    """Gives the seconds of the timed steps of a fit; those of the rest of it, compiling not
    included, go to `once`."""

    def __init__(self, plugins: list[Any], run: Path | None, log_every: int = 10) -> None:
        workload, self._timed = WORKLOADS["mlp_small"], Timed()
        self._source = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
        plugins = [*plugins, self._timed]
        self._engine = fg.Engine(
            steps=STEPS,
            log_every=log_every,
            run_dir=run,
            plugins=plugins,
            autoload=False,
        )
        self._state = self._engine.init_state(
            Trained(workload.model(key=jax.random.key(0))), self._source
        )
        self.once: list[float] = []
        self()
        self.once.clear()

    def __call__(self) -> float:
        Slow.release.clear()
        state = copy_arrays(self._state)
        begun = perf_counter()
        self._engine.fit(data=self._source, state=state, resume="never")
        ended, (opened, trained) = perf_counter(), self._timed.at[-2:]
        self.once.append(ended - begun - (trained - opened))
        return trained - opened


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Standard output and error go to /dev/null, which costs a logger that prints as much as a pipe.
    The progress display takes standard error for a terminal, where it costs more."""
    os.environ["FORCE_COLOR"] = "1"
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


if __name__ == "__main__":
    main()
