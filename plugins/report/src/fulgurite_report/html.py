"""Elements of a page. `xml.etree` escapes what is written into them."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from fulgurite_report.text import format_number


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: in it.
        number: by which its column is sorted; None for the text.
        run: the index of the run that it is of, with which it hides; None for none.
        swatch: whether the colour of that run stands before the text.
        title: what the text is short for, shown where the pointer rests; empty for nothing.
    """

    text: str
    number: float | None = None
    run: int | None = None
    swatch: bool = False
    title: str = ""


def add(parent: Element, tag: str, text: str = "", **attributes: str) -> Element:
    """Add an element and return it.

    Args:
        parent: to which it is added.
        tag: of the element.
        text: in it.
        attributes: `class_` for `class`, and `data_run` for `data-run`.
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    element = SubElement(parent, tag, {names[name]: value for name, value in attributes.items()})
    element.text = text
    return element


def add_section(parent: Element, identifier: str, title: str, note: str = "") -> Element:
    """Add a section with a heading, and return it.

    Args:
        parent: to which it is added.
        identifier: to which links lead.
        title: the heading.
        note: what to know about what follows.
    """
    section = add(parent, "section", id=identifier)
    add(section, "h2", title)
    if note:
        add(section, "p", note, class_="note")
    return section


def add_table(
    parent: Element,
    header: Sequence[Cell | str],
    rows: Sequence[Sequence[Cell | str]],
    row_runs: Sequence[int] | None = None,
) -> Element:
    """Add a table, the first column of which names the rows.

    Args:
        parent: to which it is added.
        header: the names of the columns.
        rows: their cells.
        row_runs: the index of the run that each row is of; None if they are of no single run.
    """
    scroll = add(parent, "div", class_="scroll", tabindex="0")
    table = add(scroll, "table")
    head = add(add(table, "thead"), "tr")
    for column, cell in enumerate(header):
        element = _add_cell(head, "th", cell, scope="col")
        cells = [row[column] for row in rows]
        if any(isinstance(cell, Cell) and cell.number is not None for cell in cells):
            element.set("class", "number")
    body = add(table, "tbody")
    for index, row in enumerate(rows):
        element = add(body, "tr")
        if row_runs is not None:
            element.set("data-run", str(row_runs[index]))
        _add_cell(element, "th", row[0], scope="row")
        for cell in row[1:]:
            _add_cell(element, "td", cell)
    return table


def _add_cell(row: Element, tag: str, cell: Cell | str, **attributes: str) -> Element:
    if isinstance(cell, str):
        cell = Cell(cell)
    element = add(row, tag, cell.text, **attributes)
    if cell.number is not None:
        element.set("data-sort", repr(cell.number))
        element.set("class", "number")
    if cell.title:
        element.set("title", cell.title)
    if cell.run is not None:
        element.set("data-run", str(cell.run))
    if cell.swatch:
        element.text = ""
        swatch = add_swatch(element, cell.run or 0)
        swatch.tail = cell.text
    return element


def add_swatch(parent: Element, run: int) -> Element:
    """Add a square in the colour of a run, and return it."""
    return add(parent, "span", class_="swatch", data_color=str(run), aria_hidden="true")


def make_number(value: float) -> Cell:
    """Return a cell with a number."""
    return Cell(format_number(value), value)


def make_counts(value: int | None) -> list[Cell | str]:
    """Return one cell with a whole number, empty for None, to be put together with others."""
    return [""] if value is None else [Cell(f"{value:,}", value)]
