"""Programs whose function `experiment` returns a configuration of `fulgurite_config`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite.redact import MASK
from fulgurite_config import (
    ConfigError,
    Node,
    apply_overrides,
    copy,
    diff,
    from_json,
    resolve,
    to_plain,
)
from fulgurite_runs.redact import redact

KEY = "config"
"""The key of a manifest's configuration that holds the JSON. It is one text there, since keys of
manifests do not begin with `$`."""


def build_from_config(
    config: Node, overrides: Sequence[str], saved_config: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Return what a configuration resolves to, and the form of it that the manifest holds.

    Args:
        config: what the program returned.
        overrides: texts `path=value`, with paths and wildcards of `fulgurite_config`.
        saved_config: the configuration in a run's manifest, which takes the place of the
            program's; an override that would change it is an error. It may name only what is
            defined in the packages that the program's own configuration names.

    Raises:
        ConfigurationError: an override matches nothing, or the configuration cannot be resolved.
    """
    try:
        if saved_config is None:
            apply_overrides(config, overrides)
            form = to_plain(config)
            return resolve(config), {KEY: json.dumps(redact(form), ensure_ascii=False)}
        saved = _read_saved(saved_config)
        changed = copy(saved)
        apply_overrides(changed, overrides)
        for path, (old, new) in diff(saved, changed).items():
            raise ConfigError(
                f"{path}={new} differs from what the run was started with, {path}={old}: leave it "
                "out"
            )
        allow = sorted(set(_iter_packages(to_plain(config))))
        return resolve(saved, allow), saved_config
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def _read_saved(saved_config: dict[str, Any]) -> Any:
    text = saved_config.get(KEY)
    if not isinstance(text, str):
        raise ConfigurationError(
            "the run was started by a program without a configuration: use that program"
        )
    if MASK in text:
        raise ConfigurationError(
            "the run's manifest hides a secret of its configuration, so the run cannot be built "
            "again: let the program read secrets from the environment"
        )
    return from_json(text)


def _iter_packages(form: Any) -> Iterator[str]:
    """Yield the packages of the functions and classes that a form of a configuration names."""
    if isinstance(form, dict):
        for key, value in form.items():
            if key in ("$call", "$partial", "$name"):
                yield value.partition(":")[0].partition(".")[0]
            yield from _iter_packages(value)
    elif isinstance(form, list):
        for value in form:
            yield from _iter_packages(value)
