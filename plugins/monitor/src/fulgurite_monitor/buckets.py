"""What the seconds of a run were spent on, in few buckets."""

from collections.abc import Iterable, Mapping

from fulgurite.plugins import BoundAction

BUCKETS: tuple[str, ...] = (
    "steps",
    "start",
    "compile",
    "data",
    "evaluation",
    "save",
    "restore",
    "other",
)
"""Into which the seconds of one attempt fall: `steps` are those that train."""

_CORE = {
    "dispatch": "steps",
    "wait": "steps",
    "data": "data",
    "compile": "compile",
    "start": "start",
    "check": "start",
}
_HOOKS = {
    **dict.fromkeys(("on_save", "save_checkpoint", "get_host_state", "flush_logger"), "save"),
    **dict.fromkeys(
        (
            "on_restore",
            "restore_checkpoint",
            "set_host_state",
            "check_logger_position",
            "rewind_logger",
        ),
        "restore",
    ),
}
_STAGES = {"evaluate": "evaluation", "save": "save"}


class Classifier:
    """Says into which bucket the names of `fg.Timings` fall.

    Args:
        actions: of the engine: what they do is told by their stage.
    """

    def __init__(self, actions: Iterable[BoundAction]) -> None:
        self._by_action = {action.name: _STAGES.get(action.stage, "other") for action in actions}

    def get_bucket(self, name: str) -> str:
        """Return the bucket of a name of timings."""
        if name in _CORE:
            return _CORE[name]
        if name.startswith("evaluate."):
            return "evaluation"
        if name in self._by_action:
            return self._by_action[name]
        return _HOOKS.get(name.rpartition(".")[2], "other")

    def add_up(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds by bucket.

        Args:
            seconds: by name, as `fg.Timings` has them.
        """
        totals = dict.fromkeys(BUCKETS, 0.0)
        # A copy: the training thread may add a name meanwhile.
        for name, value in dict(seconds).items():
            totals[self.get_bucket(name)] += value
        return totals
