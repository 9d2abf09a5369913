"""Names that a face does not have: the error says where they are, or what they may be."""

import fulgurite as fg
import pytest
from fulgurite import plugins


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ConfigurationError", ": it is fulgurite.errors.ConfigurationError"),
        ("Combine", ": it is fulgurite.plugins.Combine"),
        ("Accuracy", ": it is fulgurite.metrics.Accuracy"),
        ("MaskedBatch", ". Did you mean fulgurite.Batch?"),
        ("Schedule", ". Did you mean fulgurite.ActionSchedule?"),
        ("zzzzzz", ""),
        ("__path_of_nothing__", ""),
    ],
)
def test_a_name_of_another_face_is_told(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fg, name)
    assert str(caught.value) == f"module 'fulgurite' has no attribute {name!r}{hint}"
    assert not hasattr(fg, name)


def test_a_face_that_plugins_import_tells_it_too() -> None:
    name = "Every"
    with pytest.raises(AttributeError, match=r"'fulgurite\.plugins'.*: it is fulgurite\.Every$"):
        getattr(plugins, name)
