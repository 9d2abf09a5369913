"""How the command line shows an error that is no defect of the program."""

from collections.abc import Iterator

from fulgurite.printable import as_printable
from fulgurite.tracebacks import NOTE


def format_mistake(error: BaseException) -> str:
    """Return an error as one line, and its notes, such as the place in a configuration and the line
    that wrote it, below."""
    return as_printable("".join(f"{line}\n" for line in (f"error: {error}", *_iter_notes(error))))


def _iter_notes(error: BaseException) -> Iterator[str]:
    """Yield the notes of an error, and of the errors that it was made of."""
    current: BaseException | None = error
    while current is not None:
        yield from (note for note in getattr(current, "__notes__", ()) if note != NOTE)
        current = current.__cause__
