"""Check on a machine with a GPU what monitors, profiler and report say there, and print it.

A stack of bfloat16 products is trained with all of them. What they say is printed beside what is
counted and timed here by other means: FLOPs by hand, seconds by a clock around a plain JAX loop.

    python tests/bench/seeing_on_gpu.py            # a minute on one GPU
    python tests/bench/seeing_on_gpu.py --small    # elsewhere, to see that it runs

It needs no network. Every part runs, whatever became of the others; the exit code is 1 if one failed.
"""

import argparse
import itertools
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import monitor
import numpy as np
import optax
from fulgurite_logging import iter_telemetry
from fulgurite_monitor import (
    Alert,
    DeviceStatistics,
    Goodput,
    Throughput,
    find_peak,
    read_goodput,
)
from fulgurite_profiler import Profile, ProgramDump, summarize_profile
from fulgurite_profiler.command import main as show_profile
from fulgurite_report.command import report as write_report

VOCABULARY = 1024
PROFILED = range(121, 126)


@dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        width: of each square matrix.
        depth: the number of matrices.
        tokens: in a batch.
        steps: of the fit.
    """

    width: int
    depth: int
    tokens: int
    steps: int

    @property
    def flops(self) -> int:
        """Of the products of a step: each matrix one forward and two backward, of 2 FLOPs for each
        number of it and token."""
        return 6 * self.tokens * self.width**2 * self.depth


LARGE = Sizes(4096, 8, 16_384, 400)
SMALL = Sizes(128, 3, 256, 200)
sizes = SMALL


class Stack(fg.Module):
    """Square matrices in bfloat16, behind an embedding."""

    embedding: jax.Array
    weights: list[jax.Array]

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, sizes.depth + 1)
        shape = (sizes.width, sizes.width)
        self.embedding = jax.random.normal(keys[0], (VOCABULARY, sizes.width))
        self.weights = [jax.random.normal(k, shape) * sizes.width**-0.5 for k in keys[1:]]

    def compute_loss(self, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embedding"):
            values = self.embedding.astype(jnp.bfloat16)[tokens]
        for number, weight in enumerate(self.weights):
            with jax.named_scope(f"layer{number}"):
                values = jax.nn.relu(values @ weight.astype(jnp.bfloat16))
        with jax.named_scope("loss"):
            return jnp.mean(jnp.square(values.astype(jnp.float32) - 1))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.compute_loss(batch["tokens"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2)


def make_tokens() -> np.ndarray:
    """Return the tokens of eight batches."""
    return np.random.default_rng(0).integers(0, VOCABULARY, 8 * sizes.tokens).astype(np.int32)


def print_versions() -> None:
    """Print what is installed, the device, its peak and what its allocator tells."""
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-ml-py")
    for name in (*names, "equinox", "optax", "fulgurite-monitor", "fulgurite-profiler"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    device = jax.devices()[0]
    print(f"{len(jax.devices())} x {device.device_kind!r} ({device.platform})")
    print(f"peak in the table: {find_peak(device.device_kind)}")
    print(f"memory_stats: {device.memory_stats()}")


def time_by_hand() -> None:
    """Print seconds and FLOPs a second of the same step in a plain JAX loop."""
    model = Stack(key=jax.random.key(0))
    batches = np.split(make_tokens(), 8)

    def take_step(model: Stack, tokens: jax.Array) -> Stack:
        gradients = jax.grad(lambda model: model.compute_loss(tokens))(model)
        return jax.tree.map(lambda value, gradient: value - 1e-2 * gradient, model, gradients)

    step = jax.jit(take_step, donate_argnums=0)
    num_steps = sizes.steps // 4
    for tokens in batches:
        model = step(model, tokens)
    jax.block_until_ready(model)
    began = time.perf_counter()
    for tokens in itertools.islice(itertools.cycle(batches), num_steps):
        model = step(model, tokens)
    jax.block_until_ready(model)
    seconds = (time.perf_counter() - began) / num_steps
    print(f"by hand: {seconds * 1e3:.3f} ms a step, {sizes.flops:.6g} FLOP a step")
    print(f"by hand: {sizes.flops / seconds:.4g} FLOP/s")
    peak = find_peak(jax.devices()[0].device_kind)
    if peak is not None:
        print(f"by hand: MFU {sizes.flops / seconds / peak.flops:.3f}")


def train(run_dir: Path) -> None:
    """Train with all monitors, and print what they say."""
    alerts: list[str] = []
    engine = fg.Engine(
        steps=sizes.steps,
        log_every=20,
        run_dir=run_dir,
        plugins=[
            Throughput(items={"tokens": lambda batch: batch["tokens"].size}, interval=0.5),
            DeviceStatistics(interval=0.2),
            Goodput(interval=1.0),
            Alert(
                "devices/device/0/bytes_in_use > 1", do=[lambda event: alerts.append(event.message)]
            ),
            Profile(at=PROFILED.start - 1, steps=len(PROFILED)),
            ProgramDump(),
            "jsonl",
        ],
    )
    data = fg.ArrayData({"tokens": make_tokens()}, batch_size=sizes.tokens, shuffle=True)
    began = time.perf_counter()
    result = engine.fit(Stack, data)
    print(f"fit took {time.perf_counter() - began:.1f} s; {result.timings}")
    for message in result.messages:
        print(f"message: {message}")
    print(f"failures: {list(result.failures)}")
    print(f"alerts that were called: {alerts}")
    newest: dict[str, fg.Record] = {}
    counts: Counter[str] = Counter()
    for record in iter_telemetry(run_dir):
        if record.kind != "scalars":
            continue
        newest[record.source] = record
        counts[record.source] += 1
        if record.source == "throughput":
            values = {name: f"{value:.5g}" for name, value in record.values.items()}
            print(f"step {record.step}: {values}")
    for source in ("devices", "goodput"):
        if source not in newest:
            print(f"{source}: no record")
            continue
        print(f"{source}, {counts[source]} records, the newest at {newest[source].step}:")
        for name, value in newest[source].values.items():
            print(f"    {name} {value:,.6g}")
    for name, seconds in read_goodput(run_dir).seconds.items():
        print(f"goodput {name}: {seconds:.3f} s")


def show_trace(run_dir: Path) -> None:
    """Print which planes and lines the trace has, and the first operations of each."""
    (path,) = run_dir.glob("profiles/*/plugins/profile/*/*.xplane.pb")
    print(f"{path.stat().st_size:,} bytes")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        print(f"plane {plane.name!r}")
        for line in plane.lines:
            events = list(line.events)
            seconds = sum(event.duration_ns for event in events) * 1e-9
            has_operations = Counter("hlo_op" in dict(event.stats) for event in events)
            print(
                f"    line {line.name!r}: {len(events):,} events, {seconds:.4f} s, "
                f"{has_operations[True]:,} with hlo_op"
            )
            by_name: dict[str, list[Any]] = defaultdict(list)
            for event in events:
                by_name[event.name].append(event)
            longest = sorted(by_name.values(), key=lambda group: -sum(e.duration_ns for e in group))
            for group in longest[:3]:
                stats = {name: str(value)[:120] for name, value in group[0].stats}
                print(f"        {len(group)} x {group[0].name[:80]!r} {stats}")


def summarize(run_dir: Path) -> None:
    """Print the summary of the trace, and its FLOPs beside those by hand."""
    (folder,) = run_dir.glob("profiles/*")
    summary = summarize_profile(folder)
    flops = sum(operation.flops for operation in summary.operations)
    print(f"FLOPs in the trace {flops:.6g}, by hand {len(PROFILED) * sizes.flops:.6g}")
    print(f"steps {summary.steps}")
    print(f"operations take {summary.seconds:.4f} s of {sum(summary.steps.values()):.4f} s")
    show_profile([str(run_dir), "--top", "12"])


def show_programs(run_dir: Path) -> None:
    """Print what was dumped of each program."""
    for path in sorted(run_dir.glob("programs/*/*")):
        print(f"{path.relative_to(run_dir)}: {path.stat().st_size:,} bytes")
    for path in sorted(run_dir.glob("programs/*/cost.json")):
        print(path.read_text())


def stop_within_window(run_dir: Path) -> None:
    """Print what is left of a window in which training fails."""

    def fail(run: fg.Run) -> None:
        raise RuntimeError("on purpose")

    class Fail:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("fail", fg.At(13), fail)]

    engine = fg.Engine(steps=20, run_dir=run_dir, plugins=[Profile(at=10, steps=8), Fail()])
    data = fg.ArrayData({"tokens": make_tokens()}, batch_size=sizes.tokens)
    try:
        engine.fit(Stack, data)
    except RuntimeError as error:
        print(f"training ended by {error}")
    (folder,) = run_dir.glob("profiles/*")
    print(f"{folder.name}: steps {list(summarize_profile(folder).steps)}")


def make_report(run_dir: Path) -> None:
    """Print how large the page about the run is, and check what it says."""
    page = run_dir.parent / "report.html"
    exit_code = write_report([str(run_dir), "-o", str(page)])
    text = page.read_text()
    for word in ("mfu", "tokens_per_second", "bytes_in_use", "goodput", jax.devices()[0].platform):
        print(f"the page says {word!r}: {word in text}")
    if exit_code != 0:
        raise RuntimeError(f"fulgurite report returned {exit_code}")


def main() -> int:
    """Run every part; return 1 if one failed."""
    global sizes
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    sizes = SMALL if parser.parse_args().small else LARGE
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        parts: dict[str, Callable[[], None]] = {
            "versions": print_versions,
            "by hand": time_by_hand,
            "training": lambda: train(run_dir),
            "trace": lambda: show_trace(run_dir),
            "summary": lambda: summarize(run_dir),
            "programs": lambda: show_programs(run_dir),
            "an exception in a window": lambda: stop_within_window(Path(folder) / "failed"),
            "report": lambda: make_report(run_dir),
            "costs": lambda: monitor.main(["--repeats", "5"]),
        }
        for name, run_part in parts.items():
            print(f"\n== {name}", flush=True)
            try:
                run_part()
            except Exception:
                traceback.print_exc(file=sys.stdout)
                failed.append(name)
    print(f"\nfailed: {', '.join(failed) or 'nothing'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
