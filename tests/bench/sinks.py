"""What sinks cost training: the same small fit with each sink, logging every 10 steps, against one with none.

    none       the default Engine, autoload off
    jsonl, csv, console, ...    the same with one sink; console lines go to /dev/null
    all        with all of them

The ratios are of the wall time of a whole fit, its records written and closed, over that of `none`. Arms whose plugin
is not installed are left out. `slow` is a sink whose disk takes a second a record: its fit may take no longer until
training has ended, so the time counted ends there.

python tests/bench/sinks.py --json sinks.json
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from time import perf_counter
from typing import Any

import fulgurite as fg
import jax
from harness import arguments, interleaved, ratio, show, write
from overhead import WORKLOADS, Trained, copied

SINKS: dict[str, list[Any]] = {
    "none": [],
    "jsonl": ["jsonl"],
    "csv": ["csv"],
    "console": ["console"],
    "tensorboard": ["tensorboard"],
    "wandb": [{"wandb": {"project": "bench", "mode": "offline"}}],
    "progress": ["progress"],
}
STEPS = 2000


class Slow(fg.FileSink):
    """Writes nothing until it is let go, as a disk would that takes a second for each record."""

    plugin_name = "slow"
    release = threading.Event()

    def backend(self, run: fg.Run, position: Any) -> fg.Backend:
        return _Waiting(self.release)


@dataclass
class _Waiting:
    release: threading.Event

    def write(self, record: fg.Record) -> None:
        self.release.wait(1.0)

    def sync(self) -> None: ...

    def position(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Ended:
    """Notes when the last step was done, and lets slow sinks go."""

    at: list[float] = field(default_factory=list)

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        return [fg.Scheduled("ended", fg.AtEnd(), self.end, after=())]

    def end(self, run: fg.Run) -> None:
        jax.block_until_ready(run.state.module)
        self.at.append(perf_counter())
        Slow.release.set()


def main() -> None:
    options = arguments(__doc__, repeats=9).parse_args()
    installed = {entry.name for entry in entry_points(group="fulgurite.plugins")}
    names = [name for name in SINKS if name in installed or name == "none"]
    print(f"left out: {', '.join(sorted(SINKS.keys() - set(names))) or 'nothing'}")
    plugins = {name: SINKS[name] for name in names}
    plugins["all"] = [one for name in names for one in SINKS[name]]
    with tempfile.TemporaryDirectory() as folder, quiet():
        arms = {name: arm(chosen, Path(folder) / name) for name, chosen in plugins.items()}
        arms["slow"] = arm([Slow()], Path(folder) / "slow", until_end=True)
        arms["none_until_end"] = arm([], Path(folder) / "none_until_end", until_end=True)
        measured = interleaved(arms, options.repeats)
    ratios = {name: ratio(measured, name, "none") for name in names if name != "none"}
    ratios |= {"all": ratio(measured, "all", "none"), "slow": ratio(measured, "slow", "none_until_end")}
    show("time of a fit over that without sinks", ratios)
    if options.json:
        write(options.json, ratios)


def arm(plugins: list[Any], run: Path, *, until_end: bool = False) -> Callable[[], float]:
    """Seconds of a fit of `STEPS` steps, compiling not included."""
    workload, ended = WORKLOADS["mlp_small"], Ended()
    engine = fg.Engine(steps=STEPS, log_every=10, run=run, plugins=[*plugins, ended], autoload=False)
    source = fg.ArrayData(workload.arrays(), workload.batch_size, shuffle=True)
    state = engine.init(Trained(workload.model(key=jax.random.key(0))), source)

    def fit() -> float:
        Slow.release.clear()
        given = copied(state)
        begun = perf_counter()
        result = engine.fit(data=source, state=given, resume="never")
        jax.block_until_ready(result.state.step)
        return (ended.at[-1] if until_end else perf_counter()) - begun

    fit()
    return fit


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Standard output and error go to /dev/null, which costs a sink that prints as much as a pipe."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


if __name__ == "__main__":
    main()
