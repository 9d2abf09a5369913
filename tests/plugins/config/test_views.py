"""Lists and dictionaries that hold references or are computed."""

from typing import Any

import fulgurite_config as fc
import pytest
from fulgurite_config import ConfigError, L, apply_overrides, from_json, resolve, to_json


def make_config() -> Any:
    cfg = L(width=4, base=[1, 2])
    cfg.sizes = [cfg.ref.width, 10]
    cfg.named = {"a": cfg.ref.width, "b": [cfg.ref.width * 2]}
    cfg.twice = cfg.ref.base * 2
    cfg.same = cfg.ref.sizes
    return cfg


def test_a_list_with_references_reads_as_its_values() -> None:
    cfg = make_config()
    assert cfg.sizes == [4, 10] == [*cfg.sizes]
    more = [3]
    assert cfg.sizes + more == [4, 10, 3]
    assert more + cfg.sizes == [3, 4, 10]
    assert cfg.sizes[::-1] == [10, 4]
    assert repr(cfg.sizes) == "[4, 10]"
    assert cfg.named == {"a": 4, "b": [8]}
    assert repr(cfg.named) == "{'a': 4, 'b': [8]}"
    assert cfg.twice == [1, 2, 1, 2]
    assert cfg.sizes != cfg.twice
    cfg.width = 5
    assert (cfg.sizes[0], cfg.named["b"][0]) == (5, 10)


def test_changes_of_a_list_with_references_are_changes_of_the_configuration() -> None:
    cfg = make_config()
    cfg.sizes.append(cfg.ref.width)
    cfg.sizes[1] = 20
    cfg.same.insert(0, 7)
    cfg.named["c"] = 3
    cfg.named["b"].append(9)
    del cfg.named["a"]
    cfg.sizes.reverse()
    for config in (cfg, fc.copy(cfg), from_json(to_json(cfg))):
        config.width = 6
        resolved: Any = resolve(config)
        assert resolved.sizes == resolved.same == [6, 20, 6, 7]
        assert resolved.named == {"b": [12, 9], "c": 3}


def test_a_computed_list_that_is_changed_takes_the_place_of_its_expression() -> None:
    cfg = make_config()
    cfg.twice.append(5)
    cfg.base = [3]
    assert cfg.twice == [1, 2, 1, 2, 5]
    sources = {path: source for path, _, source in fc.iter_values(cfg)}
    assert sources["twice[0]"].startswith(f"{__file__}:")


def test_overrides_change_items_beside_references() -> None:
    cfg = make_config()
    texts = ["sizes[1]=20", "same[0]=3", "named['a']=1", "named.b[0]=2", "twice[3]=8"]
    changes = apply_overrides(cfg, texts)
    assert [change.new for change in changes] == [20, 3, 1, 2, 8]
    assert (cfg.sizes, cfg.named, cfg.twice) == ([3, 20], {"a": 1, "b": [2]}, [1, 2, 1, 8])
    assert cfg.base == [1, 2]


def test_values_of_a_file_change_items_beside_references() -> None:
    cfg = make_config()
    fc.apply_values(cfg, {"sizes[1]": 20, "twice[0]": 4})
    assert (cfg.sizes, cfg.twice) == ([4, 20], [4, 2, 1, 2])


def test_an_error_gives_lists_back() -> None:
    cfg = make_config()
    before = to_json(cfg)
    with pytest.raises(ConfigError, match="nothing"):
        apply_overrides(cfg, ["sizes[1]=20", "twice[0]=8", "named.b[0]=1", "nothing=1"])
    assert to_json(cfg) == before


def test_plugins_beside_a_reference_can_be_added_and_replaced() -> None:
    cfg = L(checkpointer=L(dict, every=3), engine=L(dict))
    cfg.engine.plugins = [cfg.ref.checkpointer, "jsonl"]
    cfg.engine.plugins.append("progress")
    cfg.engine.plugins[0].every = 4
    apply_overrides(cfg, ["engine.plugins[1]=console"])
    resolved: Any = resolve(cfg)
    assert resolved.engine == {"plugins": [{"every": 4}, "console", "progress"]}


def test_what_was_read_can_be_set_elsewhere() -> None:
    cfg = make_config()
    cfg.other = cfg.sizes
    cfg.width = 5
    assert cfg.other == [5, 10]
    with pytest.raises(ConfigError, match=r"nested cannot be set.*list\(\.\.\.\)"):
        cfg.nested = [cfg.sizes]
    cfg.nested = [list(cfg.sizes)]
    assert cfg.nested == [[5, 10]]


def test_functions_get_lists_whose_references_are_computed() -> None:
    cfg = make_config()
    cfg.total = fc.apply(sum, cfg.ref.sizes)
    cfg.text = fc.apply(str, [cfg.ref.named, (cfg.ref.width,)])
    assert cfg.total == 14
    assert cfg.text == "[{'a': 4, 'b': [8]}, (4,)]"


def test_a_tuple_with_a_computed_list_is_set_as_a_whole() -> None:
    cfg = make_config()
    cfg.pair = (cfg.ref.width, cfg.ref.base * 2)
    assert cfg.pair == (4, [1, 2, 1, 2])
    with pytest.raises(ConfigError, match="in a tuple"):
        cfg.pair[1].append(4)
    with pytest.raises(ConfigError, match=r"pair\[1\] is in a tuple"):
        apply_overrides(cfg, ["pair[1][0]=4"])


def keep(sizes: list[int] = [1, 2], options: dict[str, int] = {"a": 1}) -> Any:  # noqa: B006
    return list(sizes), dict(options)


def test_a_default_is_changed_for_the_call_and_not_for_the_function() -> None:
    config = L(call=L(keep))
    written = to_json(config)
    assert (config.call.sizes, config.call.options["a"]) == ([1, 2], 1)
    assert to_json(config) == written
    apply_overrides(config, ["call.sizes[0]=5"])
    config.call.options["b"] = 2
    config.call.sizes.append(9)
    assert resolve(config.call) == ([5, 2, 9], {"a": 1, "b": 2})
    assert keep() == ([1, 2], {"a": 1})


def test_a_slice_takes_what_was_read_from_a_view() -> None:
    cfg = make_config()
    cfg.named["b"][0:1] = [cfg.sizes, 3]
    assert resolve(cfg).named["b"] == [[4, 10], 3]
    assert from_json(to_json(cfg)) == cfg
