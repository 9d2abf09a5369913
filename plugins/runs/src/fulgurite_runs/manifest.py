"""What a run is made of, as JSON: written at each of its starts and with every checkpoint."""

import dataclasses
import platform
import re
from typing import Any

import fulgurite as fg
import jax
from fulgurite import Trigger
from fulgurite.plugins import (
    PluginManager,
    RegisteredPlugin,
    redact_shapes,
    redact_text,
    redact_value,
)

from fulgurite_runs.hyperparameters import describe_hyperparameters
from fulgurite_runs.program import describe_program, find_version

PACKAGES = ("fulgurite", "jax", "jaxlib", "equinox", "optax", "numpy", "orbax-checkpoint")
SETTINGS = ("seed", "steps_per_execution", "limit_train_batches", "on_nonfinite")
"""The settings of an engine, besides the length of the fit, that change its numbers."""
_CUDA = re.compile(r"cuda\s+(\d[\d.]*)", re.IGNORECASE)
# What an object without a form of its own says of itself, perhaps as a field of a secret name.
_REPR = re.compile(r"(?:\w+=)?<[^<>]*>")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def build_manifest(run: fg.Run) -> dict[str, Any]:
    """Return the description of a run.

    It has the keys `configuration` (the arguments of the program, None where there are none),
    `settings`, `plugins` (all of them, in order, with the versions of their distributions),
    `hyperparameters` (those with which the attempt begins, see `fulgurite_runs.hyperparameters`),
    `versions` (of Python, of packages, and of CUDA where the devices use it), `program` (see
    `fulgurite_runs.program`), `devices` and `model` (the lines that Equinox prints of the module,
    in which everything but arrays shows by its value). Secrets are replaced by `***`.

    Args:
        run: the run; plugins have not received their host states yet, which may be in the fields
            that are their settings.
    """
    engine = run.engine
    steps, epochs = run.requested_length
    settings = {name: getattr(engine, name) for name in SETTINGS}
    devices = jax.devices()
    mesh = engine.sharding.mesh
    return {
        "configuration": None if engine.config is None else redact_value(engine.config),
        "settings": {
            "steps": steps,
            "epochs": epochs,
            **settings,
            "data": run.data_iterator.description,
        },
        "plugins": describe_plugins(engine.plugins),
        "versions": {
            "python": platform.python_version(),
            **{name: find_version(name) for name in PACKAGES},
            **_find_cuda_version(devices[0]),
        },
        "hyperparameters": describe_hyperparameters(run),
        "program": describe_program(engine.program_file),
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": jax.process_count(),
            "mesh": None if mesh is None else dict(mesh.shape),
        },
        "model": describe_model(run.module_text),
    }


def describe_model(module_text: str) -> list[str]:
    """Return the lines that Equinox prints of a module, without addresses and secrets."""
    return [_redact_line(line) for line in _ADDRESS.sub("", module_text).splitlines()]


def _redact_line(line: str) -> str:
    """Return a line of a module's text without secrets. Those that are known by what they are
    called are between quotes, or in what an object says of itself, `<Client token=abc>`; in
    attention, `key=Linear(` is none."""
    if "'" in line or '"' in line:
        return redact_text(line)
    return redact_shapes(_REPR.sub(lambda match: redact_text(match[0]), line))


def get_arguments(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the program that made a run, by name; of a program that is a
    configuration, its values by path.

    Args:
        manifest: of the run.
    """
    configuration = manifest.get("configuration")
    if not isinstance(configuration, dict):
        return {}
    values = configuration.get("values")
    # A program may have arguments of these names, among others.
    has_both = configuration.keys() == {"config", "values"}
    if has_both and isinstance(configuration["config"], str) and isinstance(values, dict):
        return values
    return configuration


def describe_plugins(plugins: PluginManager) -> list[dict[str, Any]]:
    """Return the plugins of an engine in order, as a manifest holds them.

    Each has its `name`, the `distribution` and `version` that it comes from, its `settings` (the
    fields of a dataclass, as far as JSON can hold them), and whether it is `decisive`: a run that
    resumes without it computes other numbers.
    """
    return [_describe_plugin(plugins, plugin) for plugin in plugins.plugins.values()]


def _describe_plugin(plugins: PluginManager, plugin: RegisteredPlugin) -> dict[str, Any]:
    distribution, _, version = plugin.distribution.partition(" ")
    fields = ()
    if dataclasses.is_dataclass(plugin.plugin):
        fields = dataclasses.fields(plugin.plugin)
    values = {
        field.name: getattr(plugin.plugin, field.name, None) for field in fields if field.init
    }
    # A selection shows as it was written.
    values = {
        name: _ADDRESS.sub("", value.text) if isinstance(value, fg.Selector) else value
        for name, value in values.items()
    }
    settings = {name: value for name, value in values.items() if _is_plain(value)}
    return {
        "name": plugin.name,
        "distribution": distribution,
        "version": version,
        "decisive": _is_decisive(plugins, plugin),
        "settings": redact_value(settings),
    }


def _is_decisive(plugins: PluginManager, plugin: RegisteredPlugin) -> bool:
    hooks = plugins.get_hook_names(plugin)
    # To schedule something changes no number by itself; whoever scheduled a decision keeps a host
    # state for it. Where arrays lie changes numbers by rounding alone.
    neutral = {"register_actions", "sharding_strategy", "plugin_state_sharding"}
    kinds = {plugins.hooks[name].metadata.kind for name in hooks - neutral}
    if kinds & {"build", "traced"}:
        return True
    # The host state of a logger, such as the id of a run elsewhere, decides nothing.
    has_host_state = bool(hooks & {"get_host_state", "set_host_state"})
    return has_host_state and "logger" not in kinds


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Trigger)


def _find_cuda_version(device: Any) -> dict[str, str]:
    """Return the version of CUDA under its name, such as `12080`; nothing for other devices."""
    match = _CUDA.search(getattr(device.client, "platform_version", ""))
    return {} if match is None else {"cuda": match[1]}
