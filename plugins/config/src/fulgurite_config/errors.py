"""The error of this package, and suggestions for names."""

import difflib
from collections.abc import Iterable, Mapping

MAX_SUGGESTIONS = 20
MAX_CHOICES = 1_000
"""So many names are compared with one that was written. Only a hostile file has more."""


class ConfigError(ValueError):
    """A configuration is wrong: the message says where, and what to do.

    Example:
        from fulgurite_config import ConfigError, L

        try:
            L(optax.adamw, learnin_rate=1e-3)
        except ConfigError as error:
            assert "learning_rate" in str(error)
    """


class NotAllowedError(ConfigError):
    """A configuration names what may not be imported.

    Attributes:
        modules: for each name that is not allowed, the module that it is of.
    """

    def __init__(self, modules: Mapping[str, str], allow: Iterable[str]) -> None:
        """Say what is not allowed.

        Args:
            modules: for each name that is not allowed, the module that it is of.
            allow: what is allowed.
        """
        self.modules = dict(modules)
        is_one = len(modules) == 1
        places = ", ".join(dict.fromkeys(modules.values()))
        super().__init__(
            f"{', '.join(modules)} {'is' if is_one else 'are'} not allowed: "
            f"{'it is' if is_one else 'they are'} of {places}. If you trust "
            f"{'it' if is_one else 'them'}, add {', '.join(map(repr, modules))} to "
            f"allow=[{', '.join(map(repr, allow))}]"
        )


class NotLoadedError(ConfigError):
    """An override sets an argument of a function that is not imported, so that nobody knows its
    arguments."""


def suggest(name: str, choices: Iterable[object]) -> str:
    """Return a sentence with the choice most like a name, or with all choices.

    Args:
        name: what was written.
        choices: what could have been meant.
    """
    texts = sorted({str(choice) for choice in choices})
    compared = texts[:MAX_CHOICES]
    close = difflib.get_close_matches(name, compared, n=1)
    # People write `lr` for `learning_rate`.
    close += [text for text in compared if _get_initials(text) == name]
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(texts) > MAX_SUGGESTIONS:
        texts = [*texts[:MAX_SUGGESTIONS], f"{len(texts) - MAX_SUGGESTIONS} more"]
    return f"There is {', '.join(texts)}." if texts else "There are none."


def _get_initials(text: str) -> str:
    return "".join(word[:1] for word in text.split("_")) if "_" in text else ""
