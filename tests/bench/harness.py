"""Timing things against each other.

The arms of a benchmark take turns in one process, so that whatever slows the machine down slows all
of them, and are
compared round by round: a ratio is a median over rounds, not a quotient of medians.
"""

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some measurements, in their unit."""

    median: float
    p25: float
    p75: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Of at least one value; quartiles between two values are interpolated linearly."""
        p25, median, p75 = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
        return Spread(float(median), float(p25), float(p75))

    def __str__(self) -> str:
        return f"{self.median:9.3f} [{self.p25:9.3f} {self.p75:9.3f}]"


def interleaved(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each arm measured, a value a round. The order is another in each round, drawn from a
    fixed seed: what an arm leaves behind, such as a process that still writes, would else slow down
        the same neighbours every time."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in map(str, order.permutation(list(arms))):
            seconds[name].append(arms[name]())
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> Spread:
    """The arm `name` over the arm `base`, round by round."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])


def arguments(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has: `--json FILE` and `--repeats N`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there as well")
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=repeats, help=f"rounds (default {repeats})"
    )
    return parser


def show(title: str, rows: Mapping[str, Spread]) -> None:
    """Prints a table: median, first and third quartile."""
    print(f"\n{title}")
    for name, spread in rows.items():
        print(f"  {name:28}{spread}", flush=True)


def write(file: Path, ratios: Mapping[str, Spread], **further: Mapping[str, Spread]) -> None:
    """Writes `{"ratios": {NAME: {"median", "p25", "p75"}}, ...}`, with where it was measured."""
    tables = {"ratios": ratios, **further}
    content: dict[str, Any] = {
        title: {name: asdict(spread) for name, spread in rows.items()}
        for title, rows in tables.items()
    }
    content["versions"] = {
        name: version(name) for name in ("jax", "jaxlib", "equinox", "optax", "numpy")
    }
    content["python"], content["machine"] = platform.python_version(), platform.platform()
    file.write_text(json.dumps(content, indent=2) + "\n")
