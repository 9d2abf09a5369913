"""The results of evaluators in processes of their own, `fulgurite evaluate --group`."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite_report.curves import Curve, add_values
from fulgurite_report.lines import GrowingFile


@dataclass(frozen=True)
class _Result:
    evaluator: str
    step: int
    commit: str
    metrics: dict[str, Any]

    def add_to(self, curves: dict[str, Curve]) -> None:
        record = {"source": self.evaluator, "step": self.step, "values": self.metrics}
        add_values(curves, record, "exact")


class EvaluationFiles:
    """Reads what is new in the files `evaluations/GROUP.jsonl` of a run.

    Args:
        run: its directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._files: dict[Path, GrowingFile] = {}
        # Of several results of a step the newest counts.
        self._results: dict[tuple[str, int], _Result] = {}

    def read_new(self) -> bool:
        """Read what is new, and return whether there was anything."""
        num_results = 0
        if any(file.was_replaced() for file in self._files.values()):
            self._results.clear()
            for file in self._files.values():
                file.rewind()
        for path in sorted(self._run.glob("evaluations/*.jsonl")):
            file = self._files.setdefault(path, GrowingFile(path))
            for line in file.iter_new():
                try:
                    result = _read_result(line)
                    self._results[result.evaluator, result.step] = result
                    num_results += 1
                except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
                    file.note_damage(f"no result: {type(error).__name__}: {error}")
        return num_results > 0

    def build_curves(self) -> dict[str, Curve]:
        """Return the results over steps, by `EVALUATOR/NAME`, without those of checkpoints that a
        later attempt has superseded."""
        superseded = self._hash_commits("superseded/*") | self._hash_commits(
            "checkpoints/superseded/*"
        )
        superseded -= self._hash_commits("checkpoints")
        curves: dict[str, Curve] = {}
        for _, result in sorted(self._results.items()):
            if result.commit not in superseded:
                result.add_to(curves)
        return curves

    @property
    def problems(self) -> list[str]:
        """What of the files could not be read."""
        return [file.problem for file in self._files.values() if file.problem]

    def _hash_commits(self, folder: str) -> set[str]:
        """Return the digests that results name checkpoints by, of those in a folder."""
        digests = set()
        for path in self._run.glob(f"{folder}/step-*/COMMIT"):
            try:
                digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
            except OSError:
                continue  # it was removed meanwhile
        return digests


def _read_result(line: dict[str, Any]) -> _Result:
    """Return the result on a line.

    Raises:
        LookupError, TypeError, ValueError, OverflowError, AttributeError: it is not a result.
    """
    result = _Result(line["evaluator"], line["step"], line["commit"], line["metrics"])
    if not isinstance(result.evaluator, str) or not isinstance(result.commit, str):
        raise TypeError("evaluator and commit are not strings")
    if type(result.step) is not int:
        raise TypeError("the step is not an integer")
    result.add_to({})
    return result
