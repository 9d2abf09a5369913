"""Text: files of it, and tokens out of it; `docs/text.md` is the guide."""

from fulgurite_data.text.cache import tokenize
from fulgurite_data.text.files import TextFiles

__all__ = ["TextFiles", "tokenize"]
