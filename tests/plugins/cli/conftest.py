"""What holds for the tests of the command line."""

import pytest
from fulgurite_cli import activity


@pytest.fixture(autouse=True)
def nothing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine everything may last long enough to be told, between the lines that a test
    is about."""
    monkeypatch.setattr(activity, "DELAY", 3600.0)
