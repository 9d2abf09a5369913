"""Files that are made to take time or memory without end, or to fail in other ways than ours."""

import json
import subprocess
import sys
from typing import Any

import fulgurite_config as fc
import pytest
from fulgurite_cli.configuration import list_values
from fulgurite_cli.report import format_config
from fulgurite_config import ConfigError, L, apply_overrides, from_json, load_targets, resolve

BOUND = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from fulgurite_config import ConfigError, apply_overrides, diff, from_json, load_targets, resolve
from fulgurite_config import copy, to_python
from fulgurite_config.overrides import check_types

def ref(*path):
    return {"$ref": list(path)}

def apply(name, *arguments):
    return {"$op": "apply", "of": [{"$name": name}, *arguments]}

def double(letter):
    '''Lists that are each twice the one before.'''
    lists = {f"{letter}0": [1]}
    for index in range(60):
        lists[f"{letter}{index + 1}"] = [ref(f"{letter}{index}")] * 2
    return lists

def nest(form):
    '''Calls or sections that each hold the one before twice.'''
    nested = form | {"$id": 0}
    for index in range(40):
        nested = form | {"$id": index + 1, "a": nested, "b": {"$same": index}}
    return nested

section = {"$section": None}
long = {"l": [0] * 10_000, "text": "x" * 500_000}
paths = {"p0": {"$path": "xxxx"}}
for index in range(60):
    before = ref(f"p{index}")
    paths[f"p{index + 1}"] = {"$op": "/", "of": [before, before]}
names = {f"k{index}": index for index in range(20_000)}
forms = {
    "text": {"e": apply("builtins:str", ref("a60"))} | double("a"),
    "sum": long | {"e": apply("builtins:sum", [ref("l")] * 500, [])},
    "sum of many": {"e": apply("builtins:sum", [[0] * 10] * 20_000, [])},
    "join": long | {"e": apply("builtins:str.join", ref("text"), ref("l"))},
    "equal": double("a") | double("b") | {"e": {"$op": "==", "of": [ref("a60"), ref("b60")]}},
    "paths": paths,
    "copies": long | {f"e{index}": apply("builtins:list", ref("l")) for index in range(5_000)},
    "text of calls": {"t": nest({"$call": "builtins:dict"}), "e": {
        "$call": "builtins:str", "$args": [ref("t")]
    }},
    "text of sections": {"t": nest(section), "e": {"$call": "builtins:str", "$args": [ref("t")]}},
    "items": {"d": names} | {f"e{i}": {"$op": "[]", "of": [ref("d"), "k1"]} for i in range(5_000)},
    "equal nodes": names | {f"e{i}": {"$op": "==", "of": [ref(), ref()]} for i in range(2_000)},
    "template": {"e": {"$call": "builtins:str.format", "$args": ["{:>9999999999}", "a"]}},
}
# Those that take longest are for the soak.
LONG = ("equal", "equal nodes", "many computed lists")
is_soak = sys.argv[1:] == ["all"]
for name, form in forms.items():
    if name in LONG and not is_soak:
        continue
    try:
        resolve(from_json(json.dumps(section | form)), allow=["builtins:str.format"])
    except ConfigError as error:
        assert "more than" in str(error), (name, error)
    else:
        raise SystemExit(name)

start = [{"$ref": ["x"], "from": ["s"]}] * 20_000
forms = {
    "references": {"s": section | {"x": 1}, "l": start} | names,
    "one node at many places": {"t": nest(section | {"x": 1})},
    "many computed lists": {"x": 1} | {
        f"e{i}": {"$op": "*", "of": [[ref("x")], 10_000]} for i in range(20_000)
    },
    "a call with many arguments": {"t": {"$call": "builtins:dict"} | names},
}
for name, form in forms.items():
    if name in LONG and not is_soak:
        continue
    config = from_json(json.dumps(section | form))
    load_targets(config)
    check_types(config)
    for path in ("**.x", "**.b.x", "*.*.*.*.b.x"):
        try:
            apply_overrides(config, [f"{path}=2"])
        except ConfigError as error:
            assert "matches nothing" in str(error) or "more than" in str(error), error
    assert not diff(config, copy(config))
    to_python(config)
"""


@pytest.mark.parametrize(
    "forms",
    [pytest.param("some", marks=pytest.mark.full), pytest.param("all", marks=pytest.mark.slow)],
)
def test_a_hostile_file_ends_in_bounded_time_and_memory(forms: str) -> None:
    """What is not bounded here would not end, or need more than three gigabytes."""
    command = [sys.executable, "-c", BOUND, forms]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr + ended.stdout


def make_shared(depth: int) -> Any:
    section = L(x=1)
    for _ in range(depth):
        section = L(a=section, b=section)
    return section


def test_nodes_at_many_places_are_listed_and_changed_once() -> None:
    config = make_shared(60)
    (change,) = apply_overrides(config, ["**.x=2"])
    assert change.path == ".".join(["a"] * 60 + ["x"])
    assert len(list_values(config)) == 61
    assert format_config(config, "").count("\n") == 60
    with pytest.raises(ConfigError, match="matches nothing. There is a, b, x"):
        apply_overrides(config, ["**.other=2"])


@pytest.mark.slow
def test_what_is_shown_of_a_file_is_bounded() -> None:
    big = {"$section": None, "$id": 0, **{f"k{index}": index for index in range(2_000)}}
    form = {"$section": None, "big": big, "rows": [[{"$same": 0}]] * 2_000}
    with pytest.raises(ConfigError, match="more than 1_000_000 values"):
        format_config(from_json(json.dumps(form)), "")


@pytest.mark.parametrize(
    "text",
    [
        '{"$ref": [["x"]]}',
        '{"$ref": ["x"], "from": [["x"]]}',
        '{"$ref": ["x"], "other": 1}',
        '{"$section": null, "$id": []}',
        '{"$section": null, "$id": 0, "a": {"$same": 0}}',
        '[{"$section": null, "$id": 0}, {"$section": null, "$id": 0}]',
        '{"$section": null, "$what": 1}',
        '{"$section": null, "$call": "builtins:int"}',
        '{"$call": "builtins:int", "$unknown": 1}',
        '{"$call": 3}',
        '{"$float": "1", "x": 1}',
        '{"$float": []}',
        '{"$dict": [[{"$section": null}, 1]]}',
        '{"$dict": [1]}',
        '{"$op": [], "of": [1]}',
    ],
)
def test_what_is_no_configuration_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(text)


@pytest.mark.parametrize(
    "form",
    [
        {"$op": "/", "of": [1, 0]},
        {"$op": "%", "of": [1, 0]},
        {"$op": "+", "of": [1, "a"]},
        {"$op": "-", "of": [{}, 1]},
        {"$op": "<", "of": [1, "a"]},
        {"$op": "neg", "of": ["a"]},
        {"$op": "**", "of": [2.0, 100_000]},
        {"$op": "**", "of": [0, -1]},
        {"$op": "apply", "of": [{"$name": "builtins:int"}, "x"]},
        {"$call": "builtins:int", "$args": ["x"]},
        {"$call": "builtins:max"},
    ],
)
def test_what_cannot_be_computed_is_an_error_with_its_path(form: Any) -> None:
    config = from_json(json.dumps({"$section": None, "part": {"$section": None, "rate": form}}))
    load_targets(config)
    with pytest.raises(ConfigError, match=r"^part\.rate: .*(Error: |attribute)"):
        resolve(config)


def test_an_error_of_ones_own_function_stays_what_it_is() -> None:
    config = L(size=fc.apply(json.loads, "{"))
    with pytest.raises(json.JSONDecodeError) as caught:
        resolve(config)
    assert caught.value.__notes__ == ["while apply(json:loads, '{') was computed"]
