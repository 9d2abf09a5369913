"""Exported functions called in a process that can import neither Equinox nor Fulgurite."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

PROGRAM = Path(__file__).parent / "run_exported.py"


class Call(NamedTuple):
    """A call of an exported function.

    Attributes:
        folder: that was exported.
        function: the name of the function.
        inputs: arrays by name.
    """

    folder: Path
    function: str
    inputs: dict[str, Any]


def compute_elsewhere(calls: Sequence[Call]) -> list[dict[str, np.ndarray]]:
    """Return what calls give, by name; of a function with a single output under `out`."""
    with TemporaryDirectory() as directory:
        lines = []
        for index, call in enumerate(calls):
            names = [f"{directory}/{index}-{end}.npz" for end in ("in", "out")]
            np.savez(names[0], **call.inputs)
            lines.append(f"{call.folder} {call.function} {' '.join(names)}")
        process = subprocess.run(
            [sys.executable, str(PROGRAM)],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        assert process.returncode == 0, process.stderr
        return [dict(np.load(f"{directory}/{index}-out.npz")) for index in range(len(calls))]
