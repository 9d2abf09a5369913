"""Makes the modules beside the tests importable, and says how many pairs of the table ran."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of pairs that were equal to the oracle, refused, or told of."""
    counts = Counter[str]()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("truth: "):
                counts[name] += value
    if counts:
        numbers = [counts[f"truth: {outcome}"] for outcome in ("equal", "refused", "told")]
        terminalreporter.write_line(
            f"truth: {sum(numbers)} pairs, {numbers[1]} refused, {numbers[2]} told"
        )
