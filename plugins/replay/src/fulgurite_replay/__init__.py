"""Steps of a run executed again: proof, bisection, and the operation that made NaN."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_replay.capture import Capture
    from fulgurite_replay.capture_files import Captured, list_captures, read_capture
    from fulgurite_replay.checked import Checked, CheckError
    from fulgurite_replay.culprits import Culprit, IndexFault, Operand
    from fulgurite_replay.digests import Digests, StateDigest, digest_state, read_digests
    from fulgurite_replay.examining import Examination, examine_step
    from fulgurite_replay.forking import fork
    from fulgurite_replay.hint import ReplayHint
    from fulgurite_replay.observing import Observer
    from fulgurite_replay.pinning import PinnedProgram, PinPrograms, read_programs
    from fulgurite_replay.places import Frame, Place
    from fulgurite_replay.proof import Difference, Divergence, Proof, bisect, verify
    from fulgurite_replay.replaying import Replay, replay, replay_capture, save_batch
    from fulgurite_replay.rerun import Recorded, train_again
    from fulgurite_replay.self_check import CorruptionError, SelfCheck
    from fulgurite_replay.skipping import SkippedBatches

__all__ = [  # noqa: RUF022 - by subject
    # A step executed operation by operation.
    "Culprit",
    "Examination",
    "Frame",
    "IndexFault",
    "Operand",
    "Place",
    "Replay",
    "ReplayHint",
    "examine_step",
    "replay",
    "save_batch",
    # A step of a run on disk.
    "Capture",
    "Captured",
    "list_captures",
    "read_capture",
    "replay_capture",
    # Checks while a run trains.
    "CheckError",
    "Checked",
    "CorruptionError",
    "SelfCheck",
    # What a run recorded, compared with what its steps compute again.
    "Difference",
    "Digests",
    "Divergence",
    "PinPrograms",
    "PinnedProgram",
    "Proof",
    "StateDigest",
    "bisect",
    "digest_state",
    "read_digests",
    "read_programs",
    "verify",
    # Steps of a run executed again.
    "Observer",
    "Recorded",
    "SkippedBatches",
    "fork",
    "train_again",
]

# Imported when they are first used: `ReplayHint` is active wherever this is installed.
_MODULES = {
    "capture": ("Capture",),
    "capture_files": ("Captured", "list_captures", "read_capture"),
    "checked": ("CheckError", "Checked"),
    "culprits": ("Culprit", "IndexFault", "Operand"),
    "digests": ("Digests", "StateDigest", "digest_state", "read_digests"),
    "examining": ("Examination", "examine_step"),
    "forking": ("fork",),
    "hint": ("ReplayHint",),
    "pinning": ("PinPrograms", "PinnedProgram", "read_programs"),
    "places": ("Frame", "Place"),
    "proof": ("Difference", "Divergence", "Proof", "bisect", "verify"),
    "replaying": ("Replay", "replay", "replay_capture", "save_batch"),
    "self_check": ("CorruptionError", "SelfCheck"),
    "skipping": ("SkippedBatches",),
    "observing": ("Observer",),
    "rerun": ("Recorded", "train_again"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"fulgurite_replay.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
