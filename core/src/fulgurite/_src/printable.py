"""Text from a file is shown as text: what a terminal would obey is escaped.

A run that was downloaded may hold anything, also in its names, values and errors: sequences that
move the cursor, change the title of the window or order text from right to left.
"""

import re

# Control characters but for line breaks and tabs, separators of lines, what changes the direction
# of text, and halves of surrogate pairs, which cannot be encoded.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def as_printable(text: str) -> str:
    """Return the text with an escape, such as `\\\\u001b`, for each character that a terminal would
    obey; line breaks and tabs stay. JSON stays the same JSON."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
