"""The history of a run in its checkpoints: `run.history` continues after a resume."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
from fulgurite_runs import MAX_JSON_MEMORY, MAX_JSON_SIZE, dumps, estimate_json_memory

from fulgurite_checkpoint.validation import check_count, check_list, check_object, check_text

# Half of what is read again of one file. 10,000 records of 20 scalars are 8.5 MiB, and of 200
# scalars 85 MiB: no run could resume from those.
_MAX_SIZE = MAX_JSON_SIZE // 2
_MAX_ESTIMATE = MAX_JSON_MEMORY // 2


@dataclass(frozen=True)
class _EncodedRecord:
    """A record and its JSON.

    Attributes:
        record: held, so that no later one can have the same id.
        text: the JSON.
        size: of the text, in bytes.
        memory: that reading it takes, in bytes.
    """

    record: fg.Record
    text: str
    size: int
    memory: int


class HistoryEncoder:
    """Encodes the records of a history, each once however often it is saved.

    A history keeps up to 10,000 records. To encode that many takes 0.2 s of Python, to join what is
    encoded already 2 ms.
    """

    def __init__(self) -> None:
        self._encoded: dict[int, _EncodedRecord] = {}

    def encode(self, records: Iterable[fg.Record]) -> str:
        """Return the JSON of records, for `decode_history`; without the oldest where it would be
        too large to be read."""
        encoded = {}
        for record in records:
            entry = self._encoded.get(id(record))
            if entry is None:
                text = dumps([record.source, record.step, record.values])
                entry = _EncodedRecord(record, text, len(text.encode()), estimate_json_memory(text))
            encoded[id(record)] = entry
        self._encoded = encoded
        lines = ",\n".join(_select_newest(list(encoded.values())))
        return f'{{"records":[\n{lines}\n]}}'


def _select_newest(entries: list[_EncodedRecord]) -> list[str]:
    """Return the JSON of as many of the last records as can be read again, oldest first."""
    size = 0
    memory = 0
    for number, entry in enumerate(reversed(entries)):
        size += entry.size
        memory += entry.memory
        if size > _MAX_SIZE or memory > _MAX_ESTIMATE:
            return [entry.text for entry in entries[len(entries) - number :]]
    return [entry.text for entry in entries]


def decode_history(content: dict[str, Any]) -> tuple[fg.Record, ...]:
    """Return the records that `HistoryEncoder.encode` encoded."""
    return tuple(
        fg.Record(
            "scalars",
            check_text(source, "history"),
            check_count(step, "history"),
            check_object(values, "history"),
        )
        for source, step, values in check_list(content["records"], "history")
    )
