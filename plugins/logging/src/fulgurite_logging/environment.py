"""Record what a run is made of and where it runs, once at its start."""

import fnmatch
import logging
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import (
    REDACTED,
    hide_constructor_frames,
    is_floating_array,
    is_secret_name,
    leaves_with_paths,
    parse_path,
    redact_text,
    redact_value,
    shape_summary,
    total_size,
)

from fulgurite_logging.arguments import check_names

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
LOGGER = logging.getLogger("fulgurite")
PACKAGES = ("fulgurite", "jax", "jaxlib", "equinox", "optax", "numpy")
_USER_OPTION = re.compile("-u|--(?:proxy-)?user")


@hide_constructor_frames
@dataclass(frozen=True)
class EnvironmentLogger:
    """Emit the environment and the parameters as telemetry at the start of a fit.

    There are two records of kind `config`: `environment` (versions, plugins, devices, processes,
    command, variables) and `parameters` (count and bytes of the arrays, of each module, and of the
    optimizer's state), and one string: a table of the arrays. Secrets in the command and in
    variables are masked.

    Example:
        from fulgurite_logging import EnvironmentLogger

        plugins = [EnvironmentLogger(variables=("SLURM_*",)), "jsonl"]
        engine = fg.Engine(steps=100, run_dir="runs/digits", plugins=plugins)

    Attributes:
        variables: names or patterns of further environment variables that may be recorded.
        prefix: comes before the names of the records, `PREFIXenvironment` and the like.
        level: at which the environment also goes to Python's `logging`, under the name
            `fulgurite`, a line for each entry; such as `logging.INFO`. None for not at all.
    """

    variables: tuple[str, ...] = ()
    prefix: str = ""
    level: int | None = None

    def __post_init__(self) -> None:
        check_names(self.variables, "EnvironmentLogger: variables")
        if not isinstance(self.prefix, str):
            raise ConfigurationError(
                f"EnvironmentLogger: prefix is {self.prefix!r}; it must be a string"
            )
        if self.level is not None and type(self.level) is not int:
            raise ConfigurationError(
                f"EnvironmentLogger: level is {self.level!r}; give one such as logging.INFO, or "
                "None"
            )

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Emit the records."""
        state = run.state
        environment = self.describe_environment(run)
        parameters = f"{self.prefix}parameters"
        run.log_config(f"{self.prefix}environment", environment, stream="telemetry")
        run.log_config(parameters, describe_parameters(state), stream="telemetry")
        run.log_text(parameters, {"table": shape_summary(state.module)}, stream="telemetry")
        if self.level is not None:
            for name, value in redact_value(environment).items():
                LOGGER.log(self.level, "%senvironment/%s: %s", self.prefix, name, value)

    def describe_environment(self, run: fg.Run) -> dict[str, Any]:
        """Return where and with what the run runs, as JSON."""
        devices = jax.devices()
        patterns = (*VARIABLES, *self.variables)
        plugins = run.engine.plugins.plugins
        return {
            "argv": redact_arguments(sys.argv),
            "devices": {
                "kind": devices[0].device_kind,
                "platform": devices[0].platform,
                "count": len(devices),
            },
            "host": platform.node(),
            "machine": platform.platform(),
            "plugins": {name: plugin.distribution for name, plugin in plugins.items()},
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
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            },
            "versions": {name: version(name) for name in PACKAGES},
        }


def describe_parameters(state: fg.TrainState) -> dict[str, Any]:
    """Return elements and bytes, as JSON: of the module, of each module in it by path, of each
    array by path, and of the optimizer's state.

    `parameters` are the numbers that an optimizer may update, those in arrays of floating-point
    numbers; `extra` are the others of the module, and those of its `eqx.nn.State`.
    """
    modules: dict[str, dict[str, int]] = defaultdict(lambda: {"count": 0, "bytes": 0})
    arrays = {}
    for path, leaf in leaves_with_paths(state.module):
        if not hasattr(leaf, "dtype"):
            continue
        count, size = total_size(leaf)
        arrays[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "bytes": size}
        keys = parse_path(path)
        for depth in range(1, len(keys)):
            module = modules[str(type(keys)(keys[:depth]))]
            module["count"] += count
            module["bytes"] += size
    count, size = total_size(state.module)
    parameters, _ = total_size(eqx.filter(state.module, is_floating_array))
    model_state_count, _ = total_size(state.model_state)
    _, optimizer_size = total_size(state.opt_state)
    return {
        "count": count,
        "parameters": parameters,
        "extra": count - parameters + model_state_count,
        "bytes": size,
        "optimizer_bytes": optimizer_size,
        "modules": dict(modules),
        "arrays": arrays,
    }


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without secrets: values of names that are named like one,
    what follows an option such as `--api-key` or `-p`, and what else looks like one."""
    redacted = []
    previous = ""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if _is_secret_option(previous) and not argument.startswith("--"):
            redacted.append(REDACTED)
        elif _USER_OPTION.fullmatch(previous) and ":" in argument:
            user, _, _ = argument.partition(":")
            redacted.append(f"{user}:{REDACTED}")
        elif value and _is_secret_argument(name):
            redacted.append(f"{name}={REDACTED}")
        elif _USER_OPTION.fullmatch(name) and ":" in value:
            user, _, _ = value.partition(":")
            redacted.append(f"{name}={user}:{REDACTED}")
        else:
            redacted.append(redact_text(argument))
        previous = argument
    return redacted


def _is_secret_option(argument: str) -> bool:
    """Return whether the argument after this one is a secret."""
    name = argument.lstrip("-")
    return name != argument and (
        is_secret_name(name) or argument.lower() in {"-p", "--p", "-pass", "--pass"}
    )


def _is_secret_argument(name: str) -> bool:
    """Return whether `value` in `name=value` is a secret."""
    plain_name = name.lstrip("-").lower()
    return is_secret_name(plain_name) or plain_name == "pass" or name.lower() == "-p"
