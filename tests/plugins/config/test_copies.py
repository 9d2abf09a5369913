"""Copies that follow, and configurations that are merged."""

import copy as standard
import pickle
from typing import Any, cast

import fulgurite_config as fc
from fulgurite_config import L, apply_overrides, from_json, resolve, to_json


def test_what_is_set_in_a_one_way_copy_changes_nothing_in_the_original() -> None:
    cfg: Any = L(plugins=[L(dict, width=1), "a"], tags=["x"], d={"x": 1}, pair=(1, [2]))
    before = to_json(cfg)
    copied: Any = fc.copy_one_way(cfg)
    copied.plugins[0].width = 5
    copied.plugins.append("b")
    copied.tags.append("y")
    copied.pair[1].append(3)
    apply_overrides(copied, ["d['x']=2"])
    assert to_json(cfg) == before
    assert copied.plugins[0].width == 5
    assert copied.plugins[1:] == ["a", "b"]
    assert (copied.tags, copied.d, copied.pair[1]) == (["x", "y"], {"x": 2}, [2, 3])


def test_a_one_way_copy_follows_lists() -> None:
    cfg: Any = L(tags=["x"], d={"x": 1}, plugins=[L(dict, width=1), "a"])
    copied: Any = fc.copy_one_way(cfg)
    cfg.tags = ["y", "z"]
    cfg.d["x"] = 2
    cfg.plugins[0].width = 3
    cfg.plugins[1] = "b"
    for followed in (copied, from_json(to_json(L(a=cfg, b=copied))).b):
        assert (followed.tags, followed.d) == (["y", "z"], {"x": 2})
        assert (followed.plugins[0].width, followed.plugins[1]) == (3, "b")


def test_references_of_a_one_way_copy_lead_into_it() -> None:
    cfg: Any = L(a=1, sizes=[], x=L(dict, v=1))
    cfg.b = cfg.ref.a * 10
    cfg.sizes = [cfg.ref.a, 3]
    cfg.y = cfg.ref.x
    copied: Any = fc.copy_one_way(cfg)
    cfg.a = 2
    assert (copied.b, copied.sizes) == (20, [2, 3])
    copied.a = 5
    copied.x.v = 9
    assert (cfg.b, copied.b, copied.sizes) == (20, 50, [5, 3])
    resolved: Any = resolve(copied)
    assert resolved.x is resolved.y
    assert resolved.x == {"v": 9}


def test_a_one_way_copy_keeps_sharing_and_may_begin_with_a_list() -> None:
    shared = L(dict, v=1)
    cfg = [L(dict, a=shared, b=shared), 3]
    copied = cast(Any, fc.copy_one_way(cfg))
    shared["v"] = 2
    assert copied[0].a is copied[0].b
    assert copied[0].a is not shared
    assert (copied[0].a.v, copied[1]) == (2, 3)


def test_references_of_what_is_merged_lead_into_what_it_is_merged_into() -> None:
    cfg: Any = L(net=L(dict, width=1), b=1)
    other: Any = L(a=L(dict), net=L(dict, width=2), b=3)
    other.d = {"k": other.ref.b, "n": L(dict, x=other.ref.b)}
    other.a.from_child = other.net.ref.width
    other.a.aux.double = other.ref.b * 2
    other.a.double = other.a.ref.aux.double
    fc.merge(cfg, other)
    assert from_json(to_json(cfg)) == cfg
    other.b = 0
    cfg.b = 5
    cfg.net.width = 6
    assert (cfg.d["k"], cfg.d["n"].x, cfg.a.from_child, cfg.a.double) == (5, 5, 6, 10)


def test_a_node_that_is_merged_at_two_places_stays_one() -> None:
    cfg: Any = L(x=L(dict, v=1))
    shared = L(dict, v=2)
    fc.merge(cfg, L(x=shared, y=shared, z=[shared]))
    assert cfg.x is cfg.y is cfg.z[0]
    assert cfg.x.v == 2


def test_nodes_can_be_pickled_and_copied_by_the_standard_library() -> None:
    cfg: Any = L(a=1, part=L(dict, x=1))
    cfg.b = [cfg.ref.a * 2, cfg.part]
    cfg.aux.free = cfg.ref.part
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    shallow = standard.copy(cfg)
    shallow.a = 2
    assert (cfg.a, shallow.part is cfg.part) == (1, True)
    first, second = standard.deepcopy([cfg.part, L(x=cfg.part)])
    assert first is second.x
    assert first is not cfg.part
