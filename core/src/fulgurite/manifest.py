"""What a run is made of, as JSON: written down at each of its starts and with every checkpoint."""

import dataclasses
import platform
import re
from functools import cache
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

import jax

from fulgurite.masking import MASK, redact_text
from fulgurite.triggers import Trigger

if TYPE_CHECKING:
    from fulgurite.engine import Engine
    from fulgurite.plugins.manager import PluginManager
    from fulgurite.plugins.selection import RegisteredPlugin

PACKAGES = ("fulgurite", "jax", "jaxlib", "equinox", "optax", "numpy")
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def build_manifest(
    engine: "Engine", model: str, data: str = "", **length: int | None
) -> dict[str, Any]:
    """The manifest of a fit of `engine`; `model` is what Equinox prints of the module, in which
    everything that is no array shows by its value; `data` what the data is, in words; `length` is
    the `steps` and `epochs` that it was asked for, if not those of the engine.

    `configuration` are the arguments of the program, None where there is none; `plugins` all of
    them in order.
    """
    devices = jax.devices()
    settings = {
        name: getattr(engine, name)
        for name in (
            "steps",
            "epochs",
            "seed",
            "steps_per_execution",
            "limit_train_batches",
            "on_nonfinite",
        )
    }
    return {
        "configuration": None if engine.config is None else redact(engine.config),
        "settings": settings | length | {"data": data},
        "plugins": [_plugin(engine.plugins, one) for one in engine.plugins.plugins.values()],
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": jax.process_count(),
            "mesh": None if engine.sharding.mesh is None else dict(engine.sharding.mesh.shape),
        },
        "model": _ADDRESS.sub("", model).splitlines(),
    }


def redact(value: Any, name: str = "") -> Any:
    """A JSON value with `***` for what is called like a secret, the texts in it `masked`, and
    triggers as text."""
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if value is not None and _SECRET.search(name):
        return MASK
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, Trigger):
        return repr(value)
    return redact_text(value) if isinstance(value, str) else value


def _plugin(plugins: "PluginManager", one: "RegisteredPlugin") -> dict[str, Any]:
    hooks = plugins.get_hooks_of(one)
    # To schedule something changes no number by itself; whoever scheduled a decision keeps a host
    # state for it. That of a sink, such as the id of a run elsewhere, decides nothing, nor does
    # where arrays lie, but for rounding.
    placing = {"sharding_strategy", "plugin_state_sharding"}
    kinds = {plugins.hooks[name].kind for name in hooks - {"register_actions"} - placing}
    keeps = bool(hooks & {"get_host_state", "set_host_state"}) and "sink" not in kinds
    distribution, _, number = one.distribution.partition(" ")
    fields = dataclasses.fields(one.plugin) if dataclasses.is_dataclass(one.plugin) else ()
    values = {field.name: getattr(one.plugin, field.name, None) for field in fields if field.init}
    return {
        "name": one.name,
        "distribution": distribution,
        "version": number,
        "decisive": keeps or bool(kinds & {"build", "traced"}),
        "settings": redact({name: value for name, value in values.items() if _is_plain(value)}),
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Trigger)


@cache
def _version(name: str) -> str | None:
    return next((one.version for one in distributions(name=name)), None)
