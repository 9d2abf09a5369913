"""What may stand in an expression, and what may be read from it."""

import json
from typing import Any, cast

import fulgurite_config as fc
import pytest
from fulgurite_config import ConfigError, L, apply_overrides, from_json, resolve, to_json


def count(items: Any) -> int:
    return len(items)


def test_calls_in_expressions_are_refused_where_they_are_written() -> None:
    cfg = L(a=1)
    for make in (
        lambda: fc.apply(len, L(dict, a=1)),
        lambda: fc.apply(len, [L(dict, a=1)]),
        lambda: cfg.ref.a == L(a=1),
    ):
        with pytest.raises(ConfigError, match="cannot stand in an expression"):
            make()
    form = {"$op": "apply", "of": [{"$name": "builtins:len"}, [{"$call": "builtins:dict"}]]}
    with pytest.raises(ConfigError, match="cannot stand in an expression"):
        from_json(json.dumps(form))


@pytest.mark.parametrize("value", [lambda: 1, object()])
def test_what_has_no_name_is_refused_in_expressions_too(value: Any) -> None:
    cfg = L(a=1)
    for expression in (fc.apply(max, value), cfg.ref.a == value, fc.apply(max, [cfg.ref.a, value])):
        with pytest.raises(ConfigError, match=r"this section\.x cannot be set.*function"):
            cfg.x = expression


def test_a_function_gets_no_call_that_is_not_made() -> None:
    cfg = L(n=L(dict, a=1), many=[L(dict), L(dict)])
    cfg.size = fc.apply(len, cfg.ref.n)
    cfg.count = fc.apply(len, cfg.ref.many)
    assert cfg.count == 2
    with pytest.raises(ConfigError, match=r"len, cfg\.ref\.n\): cfg\.ref\.n is a call.*Write L\("):
        _ = cfg.size
    with pytest.raises(ConfigError, match="is a call"):
        resolve(cfg)
    cfg.size = L(count, cfg.ref.n)
    assert cast(Any, resolve(cfg)).size == 1


def test_functions_in_expressions_are_loaded_with_the_others() -> None:
    cfg = L(values=[3, 1], options=L(first=L(dict, a=1)))
    name = f"{__name__}:choose"
    cfg.chosen = cfg.ref.options[fc.apply(name, [cfg.ref.values])]
    read: Any = from_json(to_json(cfg))
    with pytest.raises(fc.NotAllowedError, match=f"{name} is not allowed"):
        fc.load_targets(read)
    fc.load_targets(read, [__name__])
    apply_overrides(read, ["chosen.a=2"])
    assert read.options.first.a == 2
    assert to_json(cfg) != to_json(read)


def choose(values: Any) -> str:
    return "first" if values else "second"


@pytest.mark.parametrize("function", [float, int, abs, round, len])
def test_functions_of_references_say_how_they_are_written(function: Any) -> None:
    cfg = L(a=1)
    with pytest.raises(ConfigError, match=rf"write apply\({function.__name__}, cfg\.ref\.a\)"):
        function(cfg.ref.a)


def test_a_slice_of_a_reference_says_what_to_write() -> None:
    cfg = L(parts=[1, 2])
    for reference in (cfg.ref.parts, cfg.ref.parts[cfg.ref.i]):
        with pytest.raises(ConfigError, match=r"none for slice\(1, None, None\): write apply"):
            reference[1:]


def test_a_value_of_one_of_several_is_a_reference_too() -> None:
    cfg = L(kind="b", kinds=L(a=L(dict, lr=1), b=L(dict, lr=[2, 3])))
    cfg.rate = cfg.ref.kinds[cfg.ref.kind].lr[-1]
    for config in (cfg, fc.copy(cfg), from_json(to_json(cfg))):
        assert config.rate == 3
    assert "cfg.ref.kinds[cfg.ref.kind]['lr'][-1]" in fc.to_python(cfg)
    with pytest.raises(AttributeError, match="is computed, and no place"):
        _ = (cfg.ref.rate + 1).lr


def test_an_expression_that_is_too_deep_is_an_error_where_it_is_set() -> None:
    cfg = L(a=1)
    deep = cfg.ref.a
    for _ in range(5_000):
        deep = deep + 1
    with pytest.raises(ConfigError, match=r"this section\.b cannot be set: it is nested too dee"):
        cfg.b = deep
    with pytest.raises(ConfigError, match="too deeply for JSON"):
        to_json([deep])
