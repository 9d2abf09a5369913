"""How the command line shows an error that is not a defect of the program."""

from collections.abc import Iterator

from fulgurite.plugins import HIDDEN_FRAMES_NOTE, as_printable, redact_shapes


def format_mistake(error: BaseException) -> str:
    """Return an error as one line, and its notes, such as the place in a configuration and the line
    that wrote it, below."""
    text = "".join(f"{line}\n" for line in (f"error: {error}", *_iter_notes(error)))
    # The log of a run of a sweep is a file. The text is ours, and says `token: ...` of no secret.
    return as_printable(redact_shapes(text))


def _iter_notes(error: BaseException) -> Iterator[str]:
    """Yield the notes of an error, and of the errors that it was made of."""
    current: BaseException | None = error
    while current is not None:
        yield from (
            note for note in getattr(current, "__notes__", ()) if note != HIDDEN_FRAMES_NOTE
        )
        current = current.__cause__
