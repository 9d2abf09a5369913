"""One grammar of paths for the core, for keys and for overrides: what one prints the others read."""

import unicodedata
from pathlib import Path

import pytest
from fulgurite.errors import PathError
from fulgurite.plugins import PathPattern, TreePath, parse_path
from fulgurite_config import ConfigError
from fulgurite_config.expressions import format_path
from fulgurite_config.paths import Wildcard, parse_path as parse_override
from fulgurite_keys.paths import Index, Name, format_parts, parse as parse_key
from hypothesis import given, strategies as st

ROOT = Path(__file__).parents[2]
NAMES = st.one_of(
    st.text("abc_*?.[]=\"'\\ \n#é1", min_size=0, max_size=6),
    st.text(max_size=4),
    st.sampled_from(["class", "__init__", "ﬁ", "a'b", 'a"b', "\\n", "\\x41", "**", "[0]", "\x00"]),
)
PATHS = st.lists(st.one_of(NAMES, st.integers()), min_size=1, max_size=5).map(tuple)


def read_key(text: str) -> tuple[str | int, ...]:
    """Return the segments of a key without wildcards or slices."""
    segments = []
    for part in parse_key(text):
        if isinstance(part, Name):
            assert not part.is_wildcard
            segments.append(part.text)
        else:
            segments.extend(part.items)
    return tuple(segments)


def test_both_copies_of_the_grammar_are_the_same() -> None:
    core = ROOT / "core/src/fulgurite/_src/tree/path_grammar.py"
    config = ROOT / "plugins/config/src/fulgurite_config/path_grammar.py"
    assert core.read_bytes() == config.read_bytes()


@given(PATHS)
def test_what_is_printed_reads_back_as_itself(path: tuple[str | int, ...]) -> None:
    of_core = str(TreePath(path))
    of_config = format_path(path)
    of_keys = format_parts(
        [Name(key, is_literal=True) if isinstance(key, str) else Index((key,)) for key in path]
    )
    for text in (of_core, of_config, of_keys):
        assert parse_path(text) == path
        assert read_key(text) == path
    assert parse_override(of_config) == path
    # What stands outside of quotes on a command line is normalized, as Python does with names.
    if unicodedata.is_normalized("NFKC", of_core):
        assert parse_override(of_core) == parse_override(of_keys) == path


TEXTS = st.from_regex(
    r"""([ab_]{0,2}[*?]{0,2}|\*\*)(\.[ab]{1,2}[?*]?|\.\*\*?|\[(\*|-?[0-9]{1,2})\]|\["x\\n'y"\]|\['\\\\\\'"'\]){0,4}""",
    fullmatch=True,
).filter(lambda text: text and not text.startswith("."))


@given(TEXTS)
def test_all_readers_know_the_same_wildcards(text: str) -> None:
    parts = parse_key(text)
    assert format_parts(parse_key(format_parts(parts))) == format_parts(parts)
    pattern = PathPattern.parse(text)
    assert (pattern.parts == (None,)) == (text == "**")
    if isinstance(parts[-1], Name) and not parts[-1].is_wildcard:
        assert [isinstance(key, Wildcard) for key in parse_override(text)] == [
            part.is_wildcard for part in parts
        ]


@pytest.mark.parametrize(
    "text", ["a..b", ".a", "a.", "a.[0]", "a[0]b", "a[", "a[]", "a[0", "a[x]", 'a["x', "a b", "a-b"]
)
def test_what_none_of_them_reads_is_an_error_of_each(text: str) -> None:
    with pytest.raises(PathError, match="path"):
        parse_path(text)
    with pytest.raises(PathError, match="key"):
        parse_key(text)
    with pytest.raises(ConfigError, match="is not a path at"):
        parse_override(text)
