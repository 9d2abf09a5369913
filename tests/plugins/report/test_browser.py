"""The page in a headless Chromium: what it asks for, draws and does."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, open_browser
from fulgurite_report import write_report
from PIL import Image
from run_files import HOSTILE, make_manifest, make_telemetry, write_run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
READOUT = "document.querySelector('.chart .readout').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        open_browser(Path(profile)) as browser,
    ):
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and a hostile one."""
    folder = tmp_path_factory.mktemp("page")
    runs = [
        write_run(
            folder / name,
            records=[
                ("train", step, {"loss": start / step, "accuracy": 0.5, HOSTILE: 1.0})
                for step in range(10, 110, 10)
            ],
            telemetry=[make_telemetry(step, 1e9 + 2 * step, {"rate": 1.0}) for step in (0, 100)],
            manifest=make_manifest(lr=start),
        )
        for name, start in (("a", 1.0), ("b", 2.0), (HOSTILE.replace("/", "\u2215"), -4.0))
    ]
    write_report(runs, folder / "report.html")
    return folder / "report.html"


def test_the_page_asks_nobody_for_anything_and_runs_nothing_that_a_run_holds(
    browser: Browser, page: Path
) -> None:
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page)
    browser.wait("document.querySelectorAll('canvas').length > 2")
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "data", "about"}
    assert len([address for address in browser.requests if address.startswith("file:")]) == 1
    assert browser.complaints == []
    assert browser.evaluate("document.title").startswith("a, b, <")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    # The policy of the page stops what its own script never does.
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://[::1]/x'}))")
    browser.wait("document.querySelector('img').complete")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def wait_for_values(browser: Browser, text: str) -> None:
    """Wait until a chart, which is drawn a little later, shows these values at the cursor."""
    browser.wait(f"{READOUT} === {json.dumps(text)}")


def test_values_at_the_cursor_are_those_of_the_records(browser: Browser, page: Path) -> None:
    browser.open(page, "#search=loss")
    browser.wait("document.querySelector('.chart canvas') !== null")
    assert browser.evaluate(READOUT).startswith("step 100b 0.02a 0.01<")
    browser.evaluate("document.querySelector('.chart').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    browser.wait(f"{READOUT}.startsWith('step 70')")
    assert browser.evaluate(READOUT).startswith("step 70b 0.028571a 0.014286<")


def test_keys_choose_runs_axes_and_search(browser: Browser, page: Path) -> None:
    browser.open(page, "#search=loss")
    browser.wait("document.querySelector('.chart canvas') !== null")
    browser.press("3")
    assert browser.evaluate("document.querySelectorAll('[data-choice]')[2].checked") is False
    wait_for_values(browser, "step 100b 0.02a 0.01")
    assert (
        browser.evaluate("document.querySelectorAll('#summary tbody tr:not([hidden])').length") == 2
    )
    browser.press("l")
    browser.press("t")
    assert browser.evaluate("document.getElementById('log-y').checked") is True
    # A step took two seconds.
    wait_for_values(browser, "second 200b 0.02a 0.01")
    address = browser.evaluate("location.hash")
    browser.press("n")
    assert browser.evaluate("document.querySelectorAll('.chart:not([hidden])').length") == 0
    browser.press("a")
    assert browser.evaluate("document.querySelectorAll('[data-choice]:checked').length") == 3
    browser.open(page, address)
    wait_for_values(browser, "second 200b 0.02a 0.01")
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "search"
    browser.press("Escape")
    browser.wait("document.querySelectorAll('.chart:not([hidden])').length > 2")


def test_a_mean_is_drawn_over_the_values_and_zooming_keeps_a_part(
    browser: Browser, page: Path
) -> None:
    browser.open(page, "#search=loss&hide=1,2&smooth=0.5")
    browser.wait("document.querySelector('.chart canvas') !== null")
    mean = 0.0
    total = 0.0
    for step in range(10, 110, 10):
        mean = 0.5 * mean + 0.5 / step
        total = 0.5 * total + 0.5
    wait_for_values(browser, f"step 100a {mean / total:.5g} (0.01)")
    browser.evaluate("document.querySelector('.chart').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "+"):
        browser.press(key)
    ticks = "document.querySelector('.chart canvas').toDataURL()"
    zoomed = browser.evaluate(ticks)
    browser.press("0")
    browser.wait(f"{ticks} !== {zoomed!r}")


def test_telemetry_is_folded_until_it_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    telemetry = [make_telemetry(step, 1e9 + step, {"load": 1.0}) for step in (1, 2)]
    telemetry = [record | {"source": "devices"} for record in telemetry]
    records = [("train", step, {"loss": 1.0}) for step in (1, 2)]
    write_report(
        [write_run(tmp_path / "run", records=records, telemetry=telemetry)], tmp_path / "page.html"
    )
    shown = (
        "[...document.querySelectorAll('.chart:not([hidden]) h3')].map(e => e.textContent).join()"
    )
    headings = (
        "[...document.querySelectorAll('.prefix:not([hidden]) button')].map(e => e.textContent)"
    )
    browser.open(tmp_path / "page.html")
    assert browser.evaluate(shown) == "train/loss"
    assert browser.evaluate(f"{headings}.join()") == "train (1),devices (1)"
    browser.evaluate("document.querySelectorAll('.prefix button')[1].click()")
    assert browser.evaluate(shown) == "train/loss,devices/load"
    browser.evaluate("document.querySelectorAll('.prefix button')[0].click()")
    assert browser.evaluate(shown) == "devices/load"
    # The address leads to the same view, and a search finds what is folded.
    browser.open(tmp_path / "page.html", browser.evaluate("location.hash"))
    assert browser.evaluate(shown) == "devices/load"
    browser.open(tmp_path / "page.html", "#search=lo")
    assert browser.evaluate(shown) == "train/loss,devices/load"


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_the_width_in_both_themes(
    browser: Browser, page: Path, tmp_path: Path, width: int, theme: str
) -> None:
    browser.open(page, width=width, theme=theme)
    browser.wait("document.querySelectorAll('canvas').length > 0")
    # Tables are wider than a telephone, and scroll in their boxes.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    tables = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert width > 400 or browser.evaluate(f"{tables}.length") > 0
    browser.take_screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        corner = picture.convert("L").getpixel((2, 2))
    assert isinstance(corner, int)
    assert (corner > 200) == (theme == "light")


def test_a_click_sorts_a_table_by_numbers(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = "[...document.querySelectorAll('#summary tbody th')].map(cell => cell.textContent[0])"
    button = (
        "[...document.querySelectorAll('#summary thead button')].find(b => b.textContent === 'lr')"
    )
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(f"{names}.join('')") == "<ab"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(f"{names}.join('')") == "ba<"


def test_charts_out_of_sight_are_drawn_for_pictures_of_the_whole_page_and_on_paper(
    browser: Browser, tmp_path: Path
) -> None:
    names = [f"loss{number}" for number in range(40)]
    records = [("train", step, dict.fromkeys(names, 1 / step)) for step in range(1, 50)]
    write_report([write_run(tmp_path / "run", records=records)], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", theme="dark")
    browser.wait("document.documentElement.dataset.drawn === 'yes'")
    assert browser.evaluate("document.querySelectorAll('canvas').length") == 40
    # A chart of another width is a chart that was drawn again.
    browser.evaluate(
        "addEventListener('beforeprint', () => window.printed ="
        " [document.documentElement.dataset.theme, ...document.querySelectorAll('.uplot')]"
        ".map(e => e.style ? e.style.width || e.clientWidth : e))"
    )
    browser.call("Page.printToPDF")
    printed = browser.evaluate("window.printed")
    assert printed[0] == "light" and len(printed) == 41 and len(set(printed[1:])) == 1
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"


def test_what_a_logarithmic_axis_cannot_show_is_said(browser: Browser, tmp_path: Path) -> None:
    values = {"negative": -1.0, "zero": 0.0, "nan": {"$float": "nan"}, "good": 2.0}
    records = [("train", step, values) for step in (0, 1, 2)]
    records.append(("test", 0, {"alone": 3.0}))
    write_report([write_run(tmp_path / "run", records=records)], tmp_path / "page.html")
    readouts = (
        "Object.fromEntries([...document.querySelectorAll('.chart')].map(e => "
        "[e.querySelector('h3').textContent, e.querySelector('.readout').textContent]))"
    )
    browser.complaints.clear()
    browser.open(tmp_path / "page.html")
    browser.wait("document.documentElement.dataset.drawn === 'yes'")
    linear = browser.evaluate(readouts)
    assert linear["train/negative"] == "step 2train/negative -1"
    assert linear["train/nan"] == "no finite value"
    assert linear["test/alone"] == "step 0test/alone 3"
    browser.press("l")
    browser.press("x")
    browser.wait("document.documentElement.dataset.drawn === 'yes'")
    logarithmic = browser.evaluate(readouts)
    nothing = "nothing above 0 for a logarithmic axis"
    assert logarithmic.pop("train/good") == "step 2train/good 2"
    assert set(logarithmic.values()) == {nothing}
    assert browser.complaints == []


def test_huge_names_do_not_make_the_page_scroll_sideways(browser: Browser, tmp_path: Path) -> None:
    long = 120 * "x"
    runs = [
        write_run(
            tmp_path / f"{name}{long}",
            records=[("train", step, {"loss": 1.0, 2 * long: 1.0}) for step in (1, 2)],
            telemetry=[make_telemetry(1, 1e9, {"message": 2 * long}, kind="text")],
            manifest=make_manifest(**{2 * long: f"{name}{2 * long}"}),
        )
        for name in "ab"
    ]
    write_report(runs, tmp_path / "page.html")
    for width in (400, 1400):
        browser.open(tmp_path / "page.html", width=width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
