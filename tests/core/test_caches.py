"""What the caches of an engine keep, and by which keys."""

import gc
import weakref

from fulgurite._src.recent import RecentCache
from fulgurite._src.tree.specs import leaf_signature


class Unhashable:
    """Equals every other object, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return True


def test_a_leaf_without_a_hash_is_a_key_by_itself_and_lives_as_long_as_the_key() -> None:
    leaf = Unhashable()
    key = leaf_signature(leaf)
    assert {key: 1}[leaf_signature(leaf)] == 1
    assert key != leaf_signature(Unhashable())
    reference = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert reference() is not None
    del key
    gc.collect()
    assert reference() is None


def test_a_cache_keeps_the_values_that_were_asked_for_last() -> None:
    cache = RecentCache[str](2)
    built = []

    def get(key: int) -> str:
        return cache.get_or_build(key, lambda: built.append(key) or str(key))

    assert [get(1), get(2), get(1), get(3)] == ["1", "2", "1", "3"]
    assert built == [1, 2, 3]
    assert cache.list_distinct() == ["1", "3"]
    get(2)
    assert built == [1, 2, 3, 2]
