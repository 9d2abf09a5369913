"""The page about runs: one self-contained file of HTML, which makes no requests."""

import base64
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from fulgurite_report import history, sections, sweep_section
from fulgurite_report.data import build_data, encode_data
from fulgurite_report.errors import ReportError
from fulgurite_report.html import add, add_swatch
from fulgurite_report.run import Run, find_runs
from fulgurite_report.text import format_time

_SECTIONS: tuple[tuple[str, Callable[[Element, Sequence[Run]], None]], ...] = (
    ("summary", sections.add_summary),
    ("sweep", sweep_section.add_sweeps),
    ("differences", sections.add_differences),
    ("curves", sections.add_curves),
    ("time", history.add_times),
    ("values", sections.add_values),
    ("media", history.add_media),
    ("checkpoints", history.add_checkpoints),
    ("messages", history.add_messages),
    ("environment", history.add_environment),
)
_HELP = (
    ("/", "search"),
    ("1 to 9", "show or hide a run"),
    ("a, n", "show all runs, or none"),
    ("l", "logarithmic y axis"),
    ("x", "logarithmic x axis"),
    ("t", "x axis: steps or time"),
    ("d", "dark or light theme"),
    ("?", "this help"),
    ("← →, + −, 0, Enter", "in a focused chart: move, zoom, reset, enlarge"),
)


def write_report(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Write a page about runs.

    Args:
        paths: directories of runs, or of such that hold runs.
        out: the file, which is replaced if it is there.

    Raises:
        ReportError: there is no run, or the file cannot be written.
    """
    target = Path(out)
    if target.is_dir():
        raise ReportError(f"{target} is a directory: give a file, such as {target / 'report.html'}")
    runs = find_runs(paths)
    for run in runs:
        run.refresh()
    page = build_page(runs)
    temporary = target.with_name(f".{target.name}.new")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise ReportError(f"{target} cannot be written: {error.strerror}") from error


def build_page(runs: Sequence[Run]) -> str:
    """Return the page about runs, which were read already."""
    styles = [_read_asset("uPlot.min.css"), _read_asset("report.css")]
    licence = "".join(f"// {line}\n" for line in _read_asset("uPlot.LICENSE").splitlines())
    ours = _read_asset("charts.js") + _read_asset("controls.js")
    # A block of their own, so that nothing of them is global.
    scripts = [licence + _read_asset("uPlot.iife.min.js"), f'"use strict";\n{{\n{ours}}}\n']
    html = Element("html", lang="en")
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(scripts)}; style-src {_hash(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    add(head, "meta", http_equiv="Content-Security-Policy", content=policy)
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="referrer", content="no-referrer")
    add(head, "title", _get_title(runs))
    for style in styles:
        add(head, "style", style)
    body = add(html, "body")
    header = add(body, "header")
    main = add(body, "main", id="main")
    for _, add_section in _SECTIONS:
        add_section(main, runs)
    _fill_header(header, runs, {section.get("id", "") for section in main})
    add(body, "script", encode_data(build_data(runs)), type="application/json", id="data")
    for script in scripts:
        add(body, "script", script)
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def _get_title(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3])
    return names if len(runs) <= 3 else f"{names} and {len(runs) - 3} more"


def _fill_header(header: Element, runs: Sequence[Run], identifiers: set[str]) -> None:
    """Add the title, the controls and the links to sections.

    Args:
        header: to which they are added.
        runs: of the page.
        identifiers: of the sections that the page has.
    """
    top = add(header, "div", class_="top")
    add(top, "h1", _get_title(runs))
    add(top, "p", f"read on {format_time(time.time())}", class_="note")
    tools = add(header, "div", class_="tools")
    add(
        add(tools, "label", "search "), "input", id="search", type="search", placeholder="/",
        size="12",
    )  # fmt: skip
    smooth = add(tools, "label", "smoothing ")
    add(smooth, "input", id="smooth", type="range", min="0", max="0.99", step="0.01", value="0")
    add(smooth, "output", "0", id="smooth-value")
    for identifier, text in (("log-y", "log y"), ("log-x", "log x"), ("time", "time axis")):
        label = add(tools, "label")
        add(label, "input", id=identifier, type="checkbox").tail = f" {text}"
    add(tools, "button", "theme", id="theme", type="button")
    add(tools, "button", "keys ?", id="help-button", type="button", aria_expanded="false")
    keys = add(header, "dl", id="help", hidden="hidden")
    for key, meaning in _HELP:
        add(keys, "dt", key)
        add(keys, "dd", meaning)
    if len(runs) > 1:
        choice = add(header, "fieldset", id="runs")
        add(choice, "legend", "runs")
        for index, run in enumerate(runs):
            label = add(choice, "label")
            add(label, "input", type="checkbox", checked="checked", data_choice=str(index))
            add_swatch(label, index).tail = run.name
        add(choice, "button", "all", id="all-runs", type="button")
        add(choice, "button", "none", id="no-runs", type="button")
    navigation = add(header, "nav", aria_label="sections")
    for identifier, _ in _SECTIONS:
        if identifier in identifiers:
            add(navigation, "a", identifier, href=f"#{identifier}")


def _hash(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _read_asset(name: str) -> str:
    return (files("fulgurite_report") / "assets" / name).read_text(encoding="utf-8")
