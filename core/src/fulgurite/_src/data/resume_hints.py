"""How a run can resume from the sources of known libraries."""

from typing import Any

_RESUME_HINTS = {
    ("datasets", "IterableDataset"): "The state of a Hugging Face IterableDataset leaves its "
    "shuffle buffer out. Each pass is the same, so 'replay', without shuffle() or with "
    "shuffle(seed=...)",
    ("torch", "DataLoader"): "Each pass over a torch DataLoader is the same, so 'replay', without "
    "shuffle=True, and with a dataset that draws no random numbers",
    ("torchdata", "StatefulDataLoader"): "Give a torchdata StatefulDataLoader get_state and "
    "set_state that call its state_dict and load_state_dict",
    ("tensorflow", "DatasetV2"): "Each pass over a tf.data.Dataset is the same, so 'replay', "
    "without shuffle() or with shuffle(seed=..., reshuffle_each_iteration=False)",
}
"""What sources of known libraries promise, by library and class."""


def get_resume_hint(source: Any) -> str:
    """Return a sentence on how a run can resume from a source: its own, that of a known library, or
    nothing.

    Args:
        source: with or without an attribute `resume_hint`.
    """
    hint = getattr(source, "resume_hint", None)
    if isinstance(hint, str):
        return hint
    for source_class in type(source).__mro__:
        library = source_class.__module__.partition(".")[0]
        hint = _RESUME_HINTS.get((library, source_class.__name__))
        if hint is not None:
            return hint
    return ""
