"""Pages of runs, read without any code of ours."""

import base64
import json
import struct
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fulgurite_report import write_report

FORMATS = {"<u4": "I", "<f4": "f", "<f8": "d"}


class Page(HTMLParser):
    """What a page holds.

    Attributes:
        data: what its script reads.
        texts: everything that it shows, by section.
        attributes: name and value of every attribute.
        tags: how often each element is there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.data: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: Counter[str] = Counter()
        self._section = ""
        self._is_data = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._is_data = ("id", "data") in attrs
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data = json.loads(data)
            self._is_data = False
        elif data.strip():
            self.texts.setdefault(self._section, []).append(data)

    def get_points(self, run: int, name: str) -> list[tuple[int, float]]:
        """Return steps and values of a curve, decoded without NumPy."""
        (curve,) = [
            curve for curve in self.data["curves"] if (curve["run"], curve["name"]) == (run, name)
        ]
        steps, values = (decode(curve[key]) for key in ("steps", "values"))
        return list(zip(steps, values, strict=True))


def decode(numbers: dict[str, str]) -> list[Any]:
    data = base64.b64decode(numbers["base64"])
    letter = FORMATS[numbers["type"]]
    return [value for (value,) in struct.iter_unpack(f"<{letter}", data)]


def write_page(folder: Path, *runs: Path) -> Page:
    write_report(runs, folder / "page.html")
    return Page(folder / "page.html")
