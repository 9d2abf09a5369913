"""Values on the command line and in files: the same for an argument of a function `experiment` and
for one of a call in a configuration."""

import functools
import json
import math
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NewType

import fulgurite as fg
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import Experiment, build_experiment
from fulgurite_config import ConfigError, L, Name, apply_overrides, apply_values, from_json, to_json


class Kind(Enum):
    A = 1
    B = 2


Count = NewType("Count", int)


def gather(
    flag: bool = False,
    number: int = 0,
    rate: float = 0.0,
    text: str = "",
    label: str | None = None,
    path: Path = Path("."),
    kind: Kind = Kind.A,
    mode: Literal["mean", 2] = "mean",
    selected: Literal[Kind.A, "none"] = Kind.A,
    count: Count = Count(0),
    counts: list[Count] = [],  # noqa: B006
    sizes: tuple[int, ...] = (),
    pair: tuple[str, float] = ("", 0.0),
    rates: list[float] = [],  # noqa: B006
    kinds: list[Kind] | None = None,
    pairs: tuple[tuple[int, int], ...] = (),
    items: list = [],  # noqa: B006
    table: dict[str, float] = {},  # noqa: B006
    either: int | tuple[int, ...] | str = 0,
    choice: list[int] | list[str] | None = None,
) -> dict[str, Any]:
    return locals()


@functools.wraps(gather)
def experiment(**arguments: Any) -> Experiment:
    return Experiment(fg.Engine(steps=1), gather(**arguments))


def set_argument(override: str) -> Any:
    return build_experiment(experiment, [override]).model[override.partition("=")[0]]


def set_value(override: str) -> Any:
    config = L(call=L(gather))
    (change,) = apply_overrides(config, [f"call.{override}"])
    again: Any = from_json(to_json(config))
    name = override.partition("=")[0]
    assert type(again.call.__config_get__(name)) in (type(change.new), Name)
    assert again.call == config.call
    return change.new


def set_argument_from_file(name: str, value: Any) -> Any:
    return build_experiment(experiment, [], start_config={name: value}).model[name]


def set_value_from_file(name: str, value: Any) -> Any:
    (change,) = apply_values(L(call=L(gather)), {"call": {name: value}})
    return change.new


@pytest.mark.parametrize("set_text", [set_argument, set_value])
@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("flag=TRUE", True),
        ("number=0xff", 255),
        ("number=1_000", 1000),
        ("rate=3", 3.0),
        ("rate=inf", math.inf),
        ("rate=-Infinity", -math.inf),
        ("rate=nan", math.nan),
        ("text=42", "42"),
        ("text=[draft", "[draft"),
        ("text=(1,)", "(1,)"),
        ("text=1,2", "1,2"),
        ("text=None", "None"),
        ("text='tis", "'tis"),
        ('text="x"', "x"),
        ("label=none", None),
        ("label='None'", "None"),
        ("path=data/x", Path("data/x")),
        ("path=3", Path("3")),
        ("kind=B", Kind.B),
        ("mode=2", 2),
        ("selected=A", Kind.A),
        ("selected=none", "none"),
        ("count=3", 3),
        ("counts=1,2", [1, 2]),
        ("sizes=[3,4]", (3, 4)),
        ("sizes=3, 4", (3, 4)),
        ("sizes=3", (3,)),
        ("sizes=", ()),
        ("sizes=()", ()),
        ("pair=a,1", ("a", 1.0)),
        ("pair=('a,b', 1)", ("a,b", 1.0)),
        ("rates=(1, .5)", [1.0, 0.5]),
        ("kinds=[A,B]", [Kind.A, Kind.B]),
        ("kinds=None", None),
        ("pairs=(1,2),(3,4)", ((1, 2), (3, 4))),
        ("pairs=[(1,2)]", ((1, 2),)),
        ("items=1,x", [1, "x"]),
        ("table={'a': 1}", {"a": 1.0}),
        ("either=5", 5),
        ("either=(5,)", (5,)),
        ("either=x", "x"),
    ],
)
def test_a_text_is_read_by_the_annotation(set_text: Any, override: str, value: Any) -> None:
    got = set_text(override)
    assert repr(got) == repr(value)


@pytest.mark.parametrize("set_text", [set_argument, set_value])
@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("flag=1", "flag=1 is not bool"),
        ("number=1e3", "number=1e3 is not int"),
        ("rate=fast", "rate=fast is not float"),
        ("kind=Z", r"kind=Z is not A \| B"),
        ("mode=3", r"mode=3 is not 'mean' \| 2"),
        ("selected=B", r"selected=B is not A \| 'none'"),
        ("count=x", "count=x is not int"),
        ("sizes=foo", r"sizes=foo is not tuple\[int, ...\]"),
        ("sizes=(1,2", r"sizes: a bracket is not closed: \) is missing"),
        ("pair=a", r"pair=a is not tuple\[str, float\]"),
        ("rates=foo", r"rates=foo is not list\[float\]"),
        ("kinds=A,C", r"kinds=A,C is not list\[.*Kind\] \| None"),
        ("table=x", r"table=x is not dict\[str, float\]"),
        ("table={'a': 'b'}", r"is not dict\[str, float\]"),
    ],
)
def test_a_text_that_is_no_value_of_the_annotation_is_an_error(
    set_text: Any, override: str, error: str
) -> None:
    with pytest.raises((ConfigError, ConfigurationError), match=error):
        set_text(override)


@pytest.mark.parametrize("set_constant", [set_argument_from_file, set_value_from_file])
@pytest.mark.parametrize(
    ("name", "plain", "value"),
    [
        ("path", "a/b", Path("a/b")),
        ("kind", "B", Kind.B),
        ("selected", "A", Kind.A),
        ("counts", [3], [3]),
        ("sizes", [3, 4], (3, 4)),
        ("kinds", ["A", "B"], [Kind.A, Kind.B]),
        ("table", {"a": 1}, {"a": 1.0}),
        ("rate", 2, 2.0),
        ("text", "[x", "[x"),
    ],
)
def test_a_file_is_read_by_the_annotation(
    set_constant: Any, name: str, plain: Any, value: Any
) -> None:
    assert repr(set_constant(name, plain)) == repr(value)


@pytest.mark.parametrize("set_constant", [set_argument_from_file, set_value_from_file])
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("sizes", ["a", "b"]),
        ("sizes", "abc"),
        ("path", 5),
        ("kind", "Z"),
        ("selected", "B"),
        ("number", "5"),
        ("number", True),
        ("text", 5),
    ],
)
def test_a_file_is_checked_by_the_annotation(set_constant: Any, name: str, plain: Any) -> None:
    with pytest.raises((ConfigError, ConfigurationError), match=f"{name}=.* is not "):
        set_constant(name, plain)


def test_arguments_are_the_same_after_a_manifest() -> None:
    overrides = [
        "kinds=A,B",
        "selected=A",
        "path=a",
        "pairs=(1,2),(3,4)",
        "pair=a,1",
        "table={'a': 2}",
    ]
    built = build_experiment(experiment, overrides)
    saved = json.loads(json.dumps(built.engine.config))
    assert build_experiment(experiment, overrides, saved).model == built.model


def test_a_type_that_no_text_can_be_read_as_says_so() -> None:
    def set_array(weights: bytes = b"") -> Experiment:
        return Experiment(fg.Engine(steps=1), weights)

    with pytest.raises(ConfigurationError, match="weights is of the type bytes, which no string"):
        build_experiment(set_array, ["weights=1"])


def test_a_path_or_a_member_in_a_section_stays_one() -> None:
    config = L(folder=Path("a"), kind=Kind.A)
    apply_overrides(config, ["folder=b/c", "kind=B"])
    assert (config.folder, config.kind) == (Path("b/c"), Kind.B)
    apply_values(config, {"folder": "d", "kind": "A"})
    assert (config.folder, config.kind) == (Path("d"), Kind.A)
    with pytest.raises(ConfigError, match=r"kind=C is not A \| B \| None"):
        apply_overrides(config, ["kind=C"])
    apply_overrides(config, ["folder=none"])
    assert config.folder is None


def test_an_item_of_an_argument_has_the_type_that_the_annotation_says() -> None:
    config = L(call=L(gather, rates=[1.0, 2.0], kinds=[Kind.A], table={"a": 1.0}, items=["x"]))
    overrides = ["call.rates[1]=3", "call.kinds[0]=B", "call.table.a=2", "call.items[0]=5"]
    changes = apply_overrides(config, overrides)
    assert repr([change.new for change in changes]) == repr([3.0, Kind.B, 2.0, 5])
    apply_values(config, {"call.table": {"a": 4}, "**.rates[0]": 5})
    assert repr((config.call.table, config.call.rates)) == "({'a': 4.0}, [5.0, 3.0])"
    # One of the lists that the annotation allows.
    config.call.choice = [1]
    assert apply_overrides(config, ["call.choice[0]=x"])[0].new == "x"
    for override in ("call.rates[0]=fast", "**.rates[0]=fast", "call.table.a=x", "call.kinds[0]=C"):
        with pytest.raises(ConfigError, match="=.* is not (float|A)"):
            apply_overrides(config, [override])
