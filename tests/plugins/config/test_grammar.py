"""Values as text, both ways: what is printed reads back as itself, and what is not a value is an error.

The values are compared with what Python's `repr` and `json` write of them, and with themselves.
"""

import enum
import json
import unicodedata
from pathlib import Path, PurePath
from typing import Any, Literal

import fulgurite as fg
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import Experiment, build_experiment, run
from fulgurite_cli.report import format_config
from fulgurite_config import (
    ConfigError,
    L,
    apply_overrides,
    apply_values,
    copy,
    from_json,
    sweep,
    to_json,
)
from fulgurite_config.formatting import format_item, format_value
from fulgurite_config.values import parse_value, read_value
from hypothesis import given, settings, strategies


class Kind(enum.Enum):
    A = 1
    true = 2
    größe = 3


STRINGS = strategies.one_of(
    strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=8),
    strategies.text(alphabet="'\"\\,[](){}:# \nné1e", max_size=8),
    strategies.sampled_from(
        ["None", "null", "TRUE", "inf", "nan", "1e400", "007", "0xff", "1_0", "3 #best", "A", "'"]
    ),
)
INTEGERS = strategies.integers(-(10**30), 10**30) | strategies.sampled_from([10**4300 - 1, 10**400])
FLOATS = strategies.floats(allow_nan=False)
LEAVES: list[tuple[Any, strategies.SearchStrategy[Any]]] = [
    (bool, strategies.booleans()),
    (int, INTEGERS),
    (float, FLOATS),
    (str, STRINGS),
    (Path, STRINGS.map(Path)),
    (Kind, strategies.sampled_from(Kind)),
    (Literal["a,b", "2", 2, "true", True], strategies.sampled_from(["a,b", "2", 2, "true", True])),
    (str | None, strategies.none() | STRINGS),
    (bool | int | float | str, strategies.one_of(strategies.booleans(), INTEGERS, FLOATS, STRINGS)),
    (Kind | str | None, strategies.none() | strategies.sampled_from(Kind) | STRINGS),
]


def make_typed(depth: int) -> strategies.SearchStrategy[tuple[Any, Any]]:
    """Pairs of an annotation and a value of it, with containers in each other `depth` deep."""

    def extend(pair: tuple[Any, strategies.SearchStrategy[Any]]) -> list[Any]:
        annotation, values = pair
        lists = strategies.lists(values, max_size=3)
        pairs = strategies.tuples(values, INTEGERS)
        tables = strategies.dictionaries(STRINGS, values, max_size=3)
        tuples = lists.map(tuple)
        return [
            (list[annotation], lists),
            (tuple[annotation, ...], tuples),
            (tuple[annotation, int], pairs),
            (dict[str, annotation], tables),
            (list[annotation] | tuple[annotation, ...] | str, lists | tuples | STRINGS),
        ]

    typed = list(LEAVES)
    new = typed
    for _ in range(depth):
        new = [more for pair in new for more in extend(pair)]
        typed += new
    return strategies.sampled_from(typed).flatmap(
        lambda pair: pair[1].map(lambda value: (pair[0], value))
    )


CONSTANTS = strategies.recursive(
    strategies.one_of(
        strategies.none(), strategies.booleans(), INTEGERS, strategies.floats(), STRINGS
    ),
    lambda children: strategies.one_of(
        strategies.lists(children, max_size=3),
        strategies.lists(children, max_size=3).map(tuple),
        strategies.dictionaries(STRINGS | INTEGERS, children, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(typed=make_typed(2))
def test_what_is_printed_of_a_value_reads_back_as_itself(typed: tuple[Any, Any]) -> None:
    annotation, value = typed
    for text in (format_value(value), format_item(value)):
        again = read_value(text, annotation, ("x",))
        assert again == value and type(again) is type(value)


@settings(max_examples=300, deadline=None)
@given(value=CONSTANTS)
def test_what_python_or_json_write_is_read_without_an_annotation(value: Any) -> None:
    for text in (format_value(value), format_item(value)):
        assert repr(parse_value(text)) == repr(value)
    if isinstance(value, str):
        return
    python = repr(value)
    if "inf" not in python and "nan" not in python:  # Python has no literals for these
        assert repr(parse_value(python)) == python
    try:
        plain = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return
    if not isinstance(plain, str):
        assert repr(parse_value(json.dumps(value))) == repr(plain)


@settings(max_examples=500, deadline=None)
@given(
    text=STRINGS | strategies.text(alphabet="'\"\\,[](){}: ab1.e-", max_size=16),
    annotation=strategies.sampled_from(
        [None, str, list[str], tuple[int | str, ...], dict[str, Any], int | float | None, list]
    ),
)
def test_any_text_is_an_error_or_reads_as_what_is_printed_of_it(text: str, annotation: Any) -> None:
    try:
        value = read_value(text, annotation, ("x",))
    except ConfigError as error:
        assert str(error).startswith("x")
        return
    again = read_value(format_value(value), annotation, ("x",))
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        (r"['a\'b','c,d']", list[str], ["a'b", "c,d"]),
        ("it's,bob's", list[str], ["it's", "bob's"]),
        ("f(1,2),${HOME}/x", list[str], ["f(1,2)", "${HOME}/x"]),
        ("'a' # b", str, "'a' # b"),
        ("'a' 'b'", str, "'a' 'b'"),
        ("3 #best", None, "3 #best"),
        ("12e45678", str, "12e45678"),
        ("12e45678", float | str, "12e45678"),
        ('{"a": null, "b": [true, false]}', None, {"a": None, "b": [True, False]}),
        ('{"a": null}', dict[str, float | None], {"a": None}),
        (f"[{'1,' * 20_000}1]", None, [1] * 20_001),
        (f"[{'1,' * 20_000}1]", list[int], [1] * 20_001),
        ("(3)", None, 3),
        ("1,2,", tuple[int, ...], (1, 2)),
        (r"'a\d\x41\n'", str, "a\\dA\n"),
    ],
)
def test_what_the_grammar_says_of_a_text(text: str, annotation: Any, value: Any) -> None:
    assert repr(read_value(text, annotation, ("x",))) == repr(value)


@pytest.mark.parametrize(
    ("text", "annotation", "error"),
    [
        ("1,,2", list[int], "a value is missing beside a comma"),
        (",1", list[str], "a value is missing beside a comma"),
        ("(1,2", list[int], r"a bracket is not closed: \) is missing"),
        ("1,2]", tuple[int, ...], "the bracket ] closes none"),
        ("'tis,so", list[str], "the quote ' is not closed"),
        ("['a' 'b']", list[str], "after a string in quotes must come a comma"),
        ("{1, 2}", None, "braces hold keys and values"),
        ("{'a': 1, 'a': 2}", dict[str, int], "has a key twice"),
        ("{[1]: 2}", None, "cannot be the key"),
        ("[fast]", None, "put strings in it into quotes"),
        ("1e400", None, "larger than the largest float"),
        ("12e45678", float, "larger than the largest float"),
        ("-1e400", list[float], "larger than the largest float"),
        ("1e-400", float | None, "smaller than the smallest float"),
        ("9" * 5000, int, "at most 4,300 digits"),
        ("9" * 5000, None, "at most 4,300 digits"),
        ("0x" + "f" * 4299, int, "at most 4,300 digits"),
        ("x" * 5000, int, r"x{200}\.\.\. is not int"),
        ("[" * 101 + "]" * 101, None, "at most 100 brackets"),
        (f"[{'1,' * 600_000}]", None, "at most 1_000_000 characters"),
        ("a\udcff", str, "character 2 is half of a surrogate pair"),
        ("٣", int, "is not int"),
    ],
)
def test_what_is_no_value_is_an_error_that_says_why(text: str, annotation: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"^x.*{error}"):
        read_value(text, annotation, ("x",))


def gather(
    text: str = "",
    paths: tuple[Path, ...] = (),
    kind: Kind = Kind.A,
    table: dict[str, list[float]] = {},  # noqa: B006
    label: str | None = None,
) -> dict[str, Any]:
    return locals()


def experiment(
    text: str = "", paths: tuple[Path, ...] = (), kind: Kind = Kind.A, größe: int = 1
) -> Experiment:
    return Experiment(fg.Engine(steps=1), [text, paths, kind, größe])


ARGUMENTS = strategies.fixed_dictionaries(
    {
        "text": STRINGS,
        "paths": strategies.lists(STRINGS.map(Path), max_size=2).map(tuple),
        "kind": strategies.sampled_from(Kind),
    }
)


@settings(max_examples=50, deadline=None)
@given(arguments=ARGUMENTS, free=CONSTANTS)
def test_the_lines_of_print_set_a_configuration_to_what_it_is(
    arguments: dict[str, Any], free: Any
) -> None:
    config = L(call=L(gather, **arguments, table={"a": [1.0, float("inf")]}), section=L(x=free))
    lines = format_config(config, "").splitlines()
    values = [line.partition("  # ")[0].rstrip().replace(" = ", "=", 1) for line in lines]
    # A function has no string, and what stands in quotes may be more than one line wide.
    overrides = [value for value in values if not value.startswith("call=")]
    changed: Any = copy(config)
    changed.call.text = None
    changed.call.kind = Kind.A
    if not isinstance(free, list | dict):  # of these, each item has a line
        changed.section.x = None
    apply_overrides(changed, overrides)
    assert to_json(changed) == to_json(config)


@settings(max_examples=50, deadline=None)
@given(arguments=ARGUMENTS)
def test_the_lines_of_print_are_the_arguments_of_a_program(arguments: dict[str, Any]) -> None:
    overrides = [f"{name}={format_value(value)}" for name, value in arguments.items()]
    model = build_experiment(experiment, overrides).model
    assert model[:3] == [arguments["text"], arguments["paths"], arguments["kind"]]


@settings(max_examples=100, deadline=None)
@given(
    key=STRINGS.filter(lambda text: not text.startswith("$")),
    value=STRINGS,
    others=strategies.lists(STRINGS),
)
def test_keys_and_values_of_any_characters_are_reached_by_the_path_that_is_printed(
    key: str, value: str, others: list[str]
) -> None:
    config = L(d={**dict.fromkeys(others, "x"), key: ""})
    (change,) = apply_overrides(config, [f"d[{key!r}]={format_item(value)}"])
    assert config.d[key] == value
    assert apply_overrides(config, [f"{change.path}=a"])[0].new == "a"


def test_a_string_in_a_section_stays_one_and_none_is_none() -> None:
    config = L(commit="", x=1.0)
    apply_overrides(config, ["commit=12e45678"])
    assert config.commit == "12e45678"
    apply_overrides(config, ["commit=007"])
    assert config.commit == "007"
    apply_overrides(config, ["commit=none"])
    assert config.commit is None


def test_a_name_typed_with_separate_accents_is_the_name() -> None:
    typed = unicodedata.normalize("NFD", "größe")
    assert typed != "größe"
    assert build_experiment(experiment, [f"{typed}=5"]).model[3] == 5
    assert build_experiment(experiment, [], start_config={typed: 6}).model[3] == 6
    config: Any = L(größe=1, d={typed: 1})
    apply_overrides(config, [f"{typed}=5"])
    apply_overrides(config, [f"d['{typed}']=7"])
    assert (config.größe, config.d[typed]) == (5, 7)
    apply_values(config, {typed: 8})
    assert config.größe == 8


def test_a_wildcard_of_any_depth_changes_only_where_all_that_follows_is() -> None:
    rows = [L(bb=L(cc=1)), L(bb=L(dd=1)), L(p=L(bb=L(cc=2)), q=L(bb=L(dd=2)), r=L(bb=5))]
    config = L(aa=rows)
    assert [change.path for change in apply_overrides(config, ["aa[2].**.bb.cc=9"])] == [
        "aa[2].p.bb.cc"
    ]
    assert [change.path for change in apply_overrides(config, ["**.bb.cc=9"])] == [
        "aa[0].bb.cc",
        "aa[2].p.bb.cc",
    ]
    with pytest.raises(ConfigError, match="matches nothing"):
        apply_overrides(config, ["**.bb.ee=9"])


def test_runs_of_a_sweep_have_names_that_no_file_system_takes_for_one() -> None:
    accent = unicodedata.normalize("NFD", "é")
    trials = sweep(L(name="x"), [f"name=Best,best,é,{accent},other"])
    folded = {unicodedata.normalize("NFC", trial.name).casefold() for trial in trials}
    assert len(folded) == 5
    assert trials[-1].name == "name=other"
    assert [trial.config.name for trial in trials] == ["Best", "best", "é", accent, "other"]


def test_no_trial_is_called_as_the_log_of_another() -> None:
    names = [trial.name for trial in sweep(L(name="x"), ["name=a,a.log,a.LOG"])]
    assert names[0] == "name=a"
    assert not any(name.lower().endswith(".log") for name in names)


@pytest.mark.parametrize(
    ("axis", "error"),
    [
        ("name=1,,2", "a value is missing"),
        ("name=[1,2", "is not closed"),
        ("name", "is not an axis"),
    ],
)
def test_an_axis_that_is_written_wrongly_is_an_error(axis: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        sweep(L(name="x"), [axis])


def test_quotes_and_keys_in_an_axis_are_read_as_in_an_override() -> None:
    config = L(d={"a=b": "x"}, e="y")
    trials = sweep(config, ["d['a=b'],e=('1,2',it's),(c,d)"])
    assert [(trial.config.d["a=b"], trial.config.e) for trial in trials] == [
        ("1,2", "it's"),
        ("c", "d"),
    ]


def test_a_file_with_a_byte_order_mark_is_read_and_a_number_out_of_range_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "values.json"
    file.write_text('{"größe": 3, "text": "x"}', encoding="utf-8-sig")
    with pytest.raises(SystemExit) as caught:
        run(experiment, ["--config", str(file), "--print"])
    assert caught.value.code == 0
    assert "größe=3 " in capsys.readouterr().out
    config = L(x=1.5)
    assert from_json("\ufeff" + to_json(config)) == config
    for number in ("1e400", "-1e400", "1e-400"):
        file.write_text(f'{{"größe": {number}}}')
        with pytest.raises(SystemExit):
            run(experiment, ["--config", str(file), "--print"])
        assert "est float" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="this is not a configuration: the number is"):
            from_json(f'{{"$section": null, "x": {number}}}')


def test_half_a_surrogate_pair_is_refused_wherever_it_comes_from() -> None:
    error = "half of a surrogate pair"
    with pytest.raises(ConfigurationError, match=rf"^text: .*{error}"):
        build_experiment(experiment, ["text=a\udcff"])
    with pytest.raises(ConfigurationError, match=rf"^text: .*{error}"):
        build_experiment(experiment, [], start_config={"text": "a\ud800"})
    with pytest.raises(ConfigError, match=rf"^x: .*{error}"):
        to_json(L(x="a\ud800"))
    with pytest.raises(ConfigError, match=rf"^x: .*{error}"):
        from_json(r'{"$section": null, "x": "a\ud800"}')
    with pytest.raises(ConfigError, match=error):
        apply_overrides(L(x="a"), ["x\udcff=3"])


def test_a_path_of_a_program_is_a_path_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(experiment, ["paths='a, b',c", "text= x", "kind=größe", "--print"])
    printed = [line.partition("  #")[0].rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[:3] == ["text=' x'", "paths=('a, b', 'c')", "kind=größe"]
    model = build_experiment(experiment, printed).model
    assert model[:2] == [" x", (PurePath("a, b"), PurePath("c"))]
