"""Arguments that are not set, or that have no name."""

from typing import Any, NamedTuple, cast

import fulgurite_config as fc
import optax
import pytest
from fulgurite_config import ConfigError, L, apply_overrides, resolve

MAKE = cast(Any, L)
"""`L` for calls that a type checker refuses."""


def gather(first: int, *others: int) -> tuple[int, ...]:
    return (first, *others)


def pair(first: int, /, second: int) -> tuple[int, int]:
    return (first, second)


@pytest.mark.parametrize("override", ["optimizer.learning_rate=3e-4", "**.learning_rate=3e-4"])
def test_an_override_sets_an_argument_that_was_left_open(override: str) -> None:
    cfg = L(optimizer=MAKE(optax.adamw))
    (change,) = apply_overrides(cfg, [override])
    assert change == ("optimizer.learning_rate", None, 3e-4)
    assert cfg.optimizer.learning_rate == 3e-4


def test_a_value_of_a_file_sets_an_argument_that_was_left_open() -> None:
    cfg = L(optimizer=MAKE(optax.adamw))
    fc.apply_values(cfg, {"optimizer": {"learning_rate": 3e-4}})
    assert cfg.optimizer.learning_rate == 3e-4


def test_an_argument_that_was_left_open_takes_no_text_for_a_number() -> None:
    cfg = L(optimizer=MAKE(optax.adamw))
    with pytest.raises(ConfigError, match=r"learning_rate=fast is not a number"):
        apply_overrides(cfg, ["optimizer.learning_rate=fast"])
    with pytest.raises(AttributeError, match=r"'learning_rate' of optax:adamw is not set"):
        _ = cfg.optimizer.learning_rate
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate \(an argument"):
        resolve(cfg)


def test_an_error_leaves_values_and_sources_as_they_were() -> None:
    cfg = L(a=1, optimizer=MAKE(optax.adamw), many=L(gather, 1, 2))
    before = list(fc.iter_values(cfg))
    texts = ["a=2", "optimizer.learning_rate=1", "optimizer.b1=0.5", "many[-1]=3", "nothing=1"]
    with pytest.raises(ConfigError, match="nothing"):
        apply_overrides(cfg, texts)
    assert list(fc.iter_values(cfg)) == before


def test_an_argument_by_position_can_be_set_by_its_name() -> None:
    cfg = L(many=L(gather, 1, 2, 3), pair=L(pair, 1, 2))
    (change,) = apply_overrides(cfg, ["many.first=5"])
    assert change == ("many.first", 1, 5)
    cfg.pair.second = 6
    assert cfg.pair.second == 6
    resolved: Any = resolve(cfg)
    assert (resolved.many, resolved.pair) == ((5, 2, 3), (1, 6))
    with pytest.raises(ConfigError, match="gets 'first' twice"):
        MAKE(gather, 1, 2, first=3)


def test_a_missing_argument_by_position_is_found_before_anything_is_called() -> None:
    cfg = L(empty=MAKE(pair), half=MAKE(pair, 1), named=MAKE(gather))
    with pytest.raises(ConfigError) as caught:
        resolve(cfg)
    for place in ("empty.first", "empty.second", "half.second", "named.first"):
        assert place in str(caught.value)


def test_a_key_of_a_dictionary_may_hold_an_equals_sign() -> None:
    cfg = L(x={"c=d": 1, 'e="': 1})
    apply_overrides(cfg, ["x['c=d']=a=2", "x['e=\"']=3"])
    assert cfg.x == {"c=d": "a=2", 'e="': 3}
    for text in ("x", "x['c=d']", "['a']" * 1_000):
        with pytest.raises(ConfigError, match="is not an override: write path=value"):
            apply_overrides(cfg, [text])


class Point(NamedTuple):
    x: int
    y: int


def reserve(**values: int) -> dict[str, int]:
    return values


def test_a_named_tuple_is_a_call() -> None:
    with pytest.raises(ConfigError, match=r"point cannot be set.*write L\(Point, \.\.\.\)"):
        L(point=[Point(1, 2)])
    assert resolve(L(Point, 1, 2)) == Point(1, 2)


def test_reserved_names_say_what_to_write() -> None:
    cfg = L(call=L(reserve))
    for name in ("ref", "aux"):
        with pytest.raises(ConfigError, match=rf"cfg\.{name} means something else.*cfg\.aux\.name"):
            setattr(cfg, name, 1)
        with pytest.raises(ConfigError, match=rf"write cfg\['{name}'\] = \.\.\. for the argument"):
            setattr(cfg.call, name, 1)
        cfg.call[name] = 1
    assert cast(Any, resolve(cfg)).call == {"ref": 1, "aux": 1}


@pytest.mark.parametrize("function", [resolve, fc.load_targets])
def test_what_is_allowed_is_a_list(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"write allow=\['fractions'\]"):
        function(L("fractions:Fraction"), allow="fractions")
