"""What a run is made of and where it runs, told once at its start."""

import fnmatch
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import fulgurite as fg
import jax
from fulgurite.redact import MASK, NAME, redact_text
from fulgurite.tree.paths import leaves_with_paths, parse
from fulgurite.tree.specs import shape_summary, total_size

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "FULGURITE_*",
    "JAX_*",
    "LIBTPU_INIT_ARGS",
    "NCCL_*",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "XLA_*",
)
PACKAGES = ("fulgurite", "jax", "jaxlib", "equinox", "optax", "numpy")
_OPTION = re.compile(rf"-+{NAME}", re.IGNORECASE)


@dataclass(frozen=True)
class EnvironmentLogger:
    """Emit the environment and the parameters as telemetry at the start of a fit.

    It makes two records of kind `config`: `environment` (versions, plugins, devices, processes,
    command, variables) and `parameters` (count and bytes of the arrays, of each module, and of the
    optimizer's state), and one text: a table of the arrays. Secrets in the command and in variables
        are masked.

    Attributes:
        variables: names or patterns of further environment variables that may be recorded.
    """

    variables: tuple[str, ...] = ()

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Emits the records."""
        state = run.state
        run.log_config("environment", self.environment(run), stream="telemetry")
        run.log_config("parameters", parameters(state), stream="telemetry")
        run.log_text("parameters", {"table": shape_summary(state.module)}, stream="telemetry")

    def environment(self, run: fg.Run) -> dict[str, Any]:
        """Where the run runs, as JSON."""
        devices = jax.devices()
        allowed = (*VARIABLES, *self.variables)
        return {
            "argv": masked_arguments(sys.argv),
            "devices": {
                "kind": devices[0].device_kind,
                "platform": devices[0].platform,
                "count": len(devices),
            },
            "host": platform.node(),
            "machine": platform.platform(),
            "plugins": {name: one.distribution for name, one in run.engine.plugins.plugins.items()},
            "process": {
                "index": jax.process_index(),
                "count": jax.process_count(),
                "pid": os.getpid(),
            },
            "python": platform.python_version(),
            "seed": run.engine.seed,
            "variables": {
                name: redact_text(f"{name}={value}").removeprefix(f"{name}=")
                for name, value in sorted(os.environ.items())
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
            },
            "versions": {name: version(name) for name in PACKAGES},
        }


def parameters(state: fg.TrainState) -> dict[str, Any]:
    """Elements and bytes of the module, of each module in it by path, of the arrays, and of the
    optimizer's state."""
    modules: dict[str, dict[str, int]] = defaultdict(lambda: {"count": 0, "bytes": 0})
    arrays = {}
    for path, leaf in leaves_with_paths(state.module):
        if not hasattr(leaf, "dtype"):
            continue
        count, size = total_size(leaf)
        arrays[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "bytes": size}
        parts = parse(path)
        for depth in range(1, len(parts)):
            module = modules[str(type(parts)(parts[:depth]))]
            module["count"] += count
            module["bytes"] += size
    count, size = total_size(state.module)
    optimizer = total_size(state.opt_state)[1]
    return {
        "count": count,
        "bytes": size,
        "optimizer_bytes": optimizer,
        "modules": dict(modules),
        "arrays": arrays,
    }


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, each `masked`, and those behind an option such as `--api-key` as
    well."""
    hidden = [bool(_OPTION.fullmatch(before)) for before in ("", *arguments)]
    return [
        MASK if secret and not argument.startswith("--") else redact_text(argument)
        for secret, argument in zip(hidden, arguments, strict=False)
    ]
