"""Which steps of a run each of its attempts made, and how long it was to train then."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_runs import RunDirectory


@dataclass(frozen=True)
class Span:
    """Steps of a run in a row, of one planned length: what is due at its end, and triggers that
    divide it, depend on that.

    Attributes:
        start: the number of updates before them.
        stop: that of the last of them; None for the newest ones.
        length: the settings `steps` and `epochs` of these attempts, by name.
    """

    start: int
    stop: int | None
    length: Mapping[str, int | None]


def list_spans(directory: RunDirectory, *, by_attempt: bool = False) -> list[Span]:
    """Return the spans of a run, oldest first, without steps that it has given up; none of a
    directory without attempts.

    Args:
        directory: of the run.
        by_attempt: whether attempts of one length are spans of their own.

    Raises:
        ConfigurationError: a span of the run ends, and it does not say where.
    """
    begun: list[tuple[int, dict[str, int | None]]] = []
    for number, manifest in directory.read_manifests().items():
        length = {name: manifest["settings"][name] for name in ("steps", "epochs")}
        start = _get_start(manifest)
        is_other = bool(begun) and (by_attempt or begun[-1][1] != length)
        if start is None and is_other:
            reason = "its data began again" if by_attempt else "it was made longer or shorter"
            raise ConfigurationError(
                f"where attempt {number} of {directory.path} began, {reason}, and a version made "
                "it that did not note at which step: its steps cannot be executed again as they "
                "were"
            )
        if start is not None:
            begun = [earlier for earlier in begun if earlier[0] < start]
        if not begun or by_attempt or begun[-1][1] != length:
            begun.append((start or 0, length))
    stops = [*(start for start, _ in begun[1:]), None]
    return [Span(start, stop, length) for (start, length), stop in zip(begun, stops, strict=True)]


def list_last_kept_steps(directory: RunDirectory) -> dict[int, int]:
    """Return the last step that a run has kept of its attempts, by their numbers, for those that a
    later one has not continued to their end.

    Args:
        directory: of the run.
    """
    last_kept: dict[int, int] = {}
    begun: int | None = None
    for number, manifest in reversed(directory.read_manifests().items()):
        if begun is not None:
            last_kept[number] = begun
        start = _get_start(manifest)
        begun = min((step for step in (begun, start) if step is not None), default=None)
    return last_kept


def _get_start(manifest: Mapping[str, Any]) -> int | None:
    """Return the number of updates before an attempt; None if that is not noted."""
    start = manifest.get("start_step")
    return start if type(start) is int else None
