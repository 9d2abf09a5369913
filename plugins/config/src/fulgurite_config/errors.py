"""The error of this package, and suggestions for names."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration is wrong: the message says where, and what to do.

    Example:
        from fulgurite_config import ConfigError, L

        try:
            L(optax.adamw, learnin_rate=1e-3)
        except ConfigError as error:
            assert "learning_rate" in str(error)
    """


def suggest(name: str, choices: Iterable[object]) -> str:
    """Return a sentence with the choice most like a name, or with all choices.

    Args:
        name: what was written.
        choices: what could have been meant.
    """
    texts = sorted({str(choice) for choice in choices})
    close = difflib.get_close_matches(name, texts, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"There is {', '.join(texts)}." if texts else "There are none."
