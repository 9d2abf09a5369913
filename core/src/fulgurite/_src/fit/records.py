"""Records, the two streams that they are of, and what they may hold."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from fulgurite._src.model.media import Media
from fulgurite._src.redact import (
    redact_registered,
    redact_registered_value,
)
from fulgurite._src.tree.specs import is_array, is_real_dtype
from fulgurite.errors import (
    ConfigurationError,
    PluginError,
    did_you_mean,
)

RecordKind = Literal["scalars", "media", "text", "config"]
"""What a record holds, and so which hook of loggers gets it."""
RecordStream = Literal["exact", "telemetry"]


@dataclass(frozen=True)
class Record:
    """Something to record.

    Example:
        class PrintLogger:
            @fg.hookimpl
            def log_record(self, record):
                print(record.step, record.source, record.values)


        PrintLogger().log_record(fg.Record("scalars", "train", 10, {"loss": 0.5}))

    Attributes:
        kind: `scalars`; `media`, which are images, histograms and figures; `text`, such as messages
            of the run; or `config`, a description of the run.
        source: where it comes from: `train`, an evaluator's name, a plugin's name.
        step: the number of completed updates.
        values: by name. Scalars are Python numbers or, rarely, NumPy arrays.
        stream: `exact` records depend only on program, configuration, seed and data, and appear
            exactly once; `telemetry` is everything else, and appears at least once.
        attempt: the number of the start of the run that made it; telemetry only.
        wall_time: seconds since 1970; telemetry only.
    """

    kind: RecordKind
    source: str
    step: int
    values: dict[str, Any]
    stream: RecordStream = "exact"
    attempt: int | None = None
    wall_time: float | None = None


def check_record_types(kind: str, source: str, values: Any) -> str:
    """Raise an error unless a plugin logs values of the types that loggers write; return the call,
    for errors.

    Args:
        kind: the kind of the record.
        source: where the values come from.
        values: by name.

    Raises:
        PluginError: a name, a number or a medium has another type.
    """
    if kind not in get_args(RecordKind):
        raise PluginError(
            f"there are no records of kind {kind!r}. {did_you_mean(kind, get_args(RecordKind))}"
        )
    where = f"run.log_{kind}({source!r}, ...)"
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in (source, *values)):
        raise PluginError(
            f"{where}: pass the source as a string, and the values as a dictionary with strings as "
            f"keys, not {values!r}"
        )
    for name, value in values.items():
        if kind == "scalars" and not _is_number(value):
            raise PluginError(
                f"{where}: {name!r} is of type {type(value).__name__}; pass numbers or arrays of "
                "numbers"
            )
        if kind == "media" and not isinstance(value, Media):
            raise PluginError(
                f"{where}: {name!r} is of type {type(value).__name__}; pass media, such as those "
                "of fulgurite_logging.media"
            )
    return where


def as_python_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a record of scalars, with Python numbers for those without an axis.

    Args:
        values: by name, on the host.
    """
    return {
        name: value.item() if getattr(value, "shape", None) == () else value
        for name, value in values.items()
    }


def mask_record(record: Record) -> Record:
    """Return a record without registered secrets: in its source, in names and in strings."""
    values = redact_registered_value(record.values)
    if record.kind == "media":
        values = {name: _mask_media(value) for name, value in values.items()}
    return replace(record, source=redact_registered(record.source), values=values)


def _mask_media(media: Media) -> Media:
    """Return a medium without registered secrets in those of its fields that are strings."""
    values = {field.name: getattr(media, field.name) for field in fields(media)}
    strings = {name: value for name, value in values.items() if isinstance(value, str)}
    masked = redact_registered_value(strings)
    return media if masked == strings else replace(media, **masked)


def _is_number(value: Any) -> bool:
    if hasattr(value, "dtype"):
        return is_real_dtype(value.dtype)
    return isinstance(value, bool | int | float)


def check_json_value(value: Any, where: str) -> None:
    """Raise a `ConfigurationError` unless `value` can be written as JSON, with arrays of real
    numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if is_array(value) and is_real_dtype(value.dtype):
        return
    if isinstance(value, list | tuple):
        for item in value:
            check_json_value(item, where)
        return
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{where}: {type(value).__name__} cannot be written as JSON: {value!r}"
        )
    for key, item in value.items():
        # `$` begins the keys by which JSON holds arrays and numbers that are not finite.
        if not isinstance(key, str) or key.startswith("$"):
            raise ConfigurationError(
                f"{where}: {key!r} cannot be a key in JSON: keys are strings that do not begin "
                "with '$'"
            )
        check_json_value(item, where)
