"""The sections of the page that say what happened and with what: times, media, checkpoints,
messages, environment."""

import base64
import re
from collections import defaultdict
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from fulgurite_report.attempts import Attempt
from fulgurite_report.differences import describe
from fulgurite_report.html import (
    Cell,
    add,
    add_section,
    add_swatch,
    add_table,
    make_counts,
    make_number,
)
from fulgurite_report.pictures import Picture, iter_pictures
from fulgurite_report.run import Run
from fulgurite_report.text import (
    as_printable,
    format_seconds,
    format_size,
    format_time,
    format_value,
)
from fulgurite_report.timing import find_parts, find_seconds, get_kind

_STEPS_OF_PICTURES = 8
_MOST_PICTURE_BYTES = 2 << 20
_MOST_MESSAGES = 300
_MOST_CHECKPOINTS = 50
_MOST_TEXT = 20_000
_NUMBER = re.compile(r"/\d+$")


def add_times(main: Element, runs: Sequence[Run]) -> None:
    """Add a bar for each run that says where its time went, and a table of its attempts."""
    note = (
        "Run time is how long the processes of a run were alive, from the start of each to its "
        "last sign of life. The parts of a bar add up to it, but for down, the pauses between "
        "attempts. All bars are on one scale."
    )
    section = add_section(main, "time", "Time", note)
    parts_by_run = [find_parts(run) for run in runs]
    longest = max(sum(parts.values()) for parts in parts_by_run)
    for index, (run, parts) in enumerate(zip(runs, parts_by_run, strict=True)):
        figure = add(section, "figure", data_run=str(index))
        caption = add(figure, "figcaption")
        add_swatch(caption, index).tail = run.name
        add(caption, "span", _describe_time(run), class_="note")
        if parts:
            _add_bar(figure, parts, longest)
        else:
            text = "No parts: they come with the plugin 'goodput', and are saved with checkpoints."
            add(figure, "p", text, class_="note")
    rows = []
    indices = []
    for index, run in enumerate(runs):
        previous: Attempt | None = None
        newest_step = 0
        for attempt in run.attempts:
            rows.append(_describe_attempt(index, run, attempt, previous, newest_step))
            indices.append(index)
            previous = attempt
            newest_step = max(newest_step, attempt.last_step or 0)
    if rows:
        header = [
            "run",
            "attempt",
            "began",
            "run time",
            "down before",
            "from",
            "to",
            "repeated steps",
        ]
        add_table(section, header, rows, indices)


def _describe_time(run: Run) -> str:
    """Return how long a run was alive, and from where its parts are known."""
    texts = [f"run time {format_seconds(find_seconds(run))}"]
    goodput = run.curves.get("goodput/goodput")
    if goodput is not None:
        texts.append(f"goodput {goodput.last:.1%}: the share of the bar for steps that were kept")
    elif run.checkpoints:
        texts.append("parts as of the newest checkpoint")
    return f" {', '.join(texts)}"


def _add_bar(figure: Element, parts: dict[str, float], longest: float) -> None:
    """Add a bar, and what its parts mean.

    Args:
        figure: to which they are added.
        parts: seconds by name.
        longest: the seconds of the longest bar.
    """
    total = sum(parts.values())
    svg = add(figure, "svg", viewBox="0 0 1000 20", preserveAspectRatio="none", aria_hidden="true")
    legend = add(figure, "ul", class_="parts")
    left = 0.0
    for part, seconds in parts.items():
        width = 1000 * seconds / longest
        kind = get_kind(part).replace(" ", "-")
        name = as_printable(part)
        bar = add(
            svg, "rect", x=f"{left:.2f}", y="0", width=f"{width:.2f}", height="20",
            class_=f"part-{kind}",
        )  # fmt: skip
        add(bar, "title", f"{name} {format_seconds(seconds)}")
        item = add(legend, "li")
        add(
            item, "span", class_=f"swatch part-{kind}", aria_hidden="true"
        ).tail = f"{name} {format_seconds(seconds)}, {seconds / total:.1%}"
        left += width


def _describe_attempt(
    index: int, run: Run, attempt: Attempt, previous: Attempt | None, newest_step: int
) -> list[Cell | str]:
    """Return the row of an attempt.

    Args:
        index: of the run.
        run: it.
        attempt: it.
        previous: the one before it.
        newest_step: that any attempt before it is known to have reached.
    """
    pause = None if previous is None else max(attempt.began - previous.last_sign, 0.0)
    repeated = min(newest_step, attempt.last_step or 0) - (attempt.first_known_step or 0)
    return [
        Cell(run.name, run=index, swatch=True),
        *make_counts(attempt.number),
        Cell(format_time(attempt.began), attempt.began),
        Cell(format_seconds(attempt.seconds), attempt.seconds),
        Cell(format_seconds(pause), pause or 0.0),
        *make_counts(attempt.first_known_step),
        *make_counts(attempt.last_step),
        *make_counts(max(repeated, 0)),
    ]


def add_media(main: Element, runs: Sequence[Run]) -> None:
    """Add the newest pictures that the logger `tensorboard` wrote."""
    strips = [
        (index, name, by_step)
        for index, run in enumerate(runs)
        for name, by_step in sorted(_collect_pictures(run).items())
    ]
    if not strips:
        return
    note = (
        f"Those of the newest {_STEPS_OF_PICTURES} steps of each name that the logger "
        "'tensorboard' wrote."
    )
    section = add_section(main, "media", "Media", note)
    room = _MOST_PICTURE_BYTES
    num_left_out = 0
    for index, name, by_step in strips:
        block = add(section, "div", data_run=str(index), data_search=name)
        add_swatch(add(block, "h3"), index).tail = f"{runs[index].name} {name}"
        strip = add(block, "div", class_="strip", tabindex="0")
        for step, pictures in reversed(by_step.items()):
            size = sum(len(picture.png) for picture in pictures)
            if size > room:
                num_left_out += len(pictures)
            else:
                room -= size
                _add_pictures(strip, name, step, pictures)
    if num_left_out:
        text = f"{num_left_out} pictures are left out, so that the page stays small."
        add(section, "p", text, class_="note")


def _collect_pictures(run: Run) -> dict[str, dict[int, list[Picture]]]:
    """Return the pictures of the newest steps by name and step; those of one value, which are
    numbered, together."""
    collected: dict[str, dict[int, list[Picture]]] = defaultdict(dict)
    for picture in iter_pictures(run.path):
        by_step = collected[as_printable(_NUMBER.sub("", picture.name))]
        by_step.setdefault(picture.step, []).append(picture)
        if len(by_step) > _STEPS_OF_PICTURES:
            del by_step[min(by_step)]
    return collected


def _add_pictures(strip: Element, name: str, step: int, pictures: Sequence[Picture]) -> None:
    figure = add(strip, "figure")
    row = add(figure, "div", class_="pictures")
    for picture in pictures:
        source = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
        add(row, "img", src=source, alt=f"{name} at step {step:,}", loading="lazy")
    add(figure, "figcaption", f"step {step:,}")


def add_checkpoints(main: Element, runs: Sequence[Run]) -> None:
    """Add a table of the checkpoints that there are."""
    section = add_section(main, "checkpoints", "Checkpoints")
    rows = []
    indices = []
    num_left_out = 0
    for index, run in enumerate(runs):
        monitor = run.monitor
        num_left_out += len(run.checkpoints[:-_MOST_CHECKPOINTS])
        for checkpoint in run.checkpoints[-_MOST_CHECKPOINTS:]:
            value = None if monitor is None else checkpoint.metrics.get(monitor[0])
            size = checkpoint.measure_size()
            saved = checkpoint.wall_time
            rows.append(
                [
                    Cell(run.name, run=index, swatch=True),
                    *make_counts(checkpoint.step),
                    Cell(format_size(size), size),
                    Cell(format_time(saved), saved or 0.0),
                    "" if monitor is None else as_printable(monitor[0]),
                    "" if value is None else make_number(value),
                ]
            )
            indices.append(index)
    if not rows:
        add(section, "p", "There are none in the directories of these runs.")
        return
    add_table(section, ["run", "step", "size", "saved", "metric", "value"], rows, indices)
    if num_left_out:
        add(section, "p", f"{num_left_out:,} older ones are not listed.", class_="note")


def add_messages(main: Element, runs: Sequence[Run]) -> None:
    """Add a table of what the runs said, the newest last."""
    section = add_section(main, "messages", "Messages")
    messages = [(message, index) for index, run in enumerate(runs) for message in run.messages]
    messages.sort(key=lambda item: item[0].wall_time)
    if not messages:
        add(section, "p", "There are none.")
        return
    if len(messages) > _MOST_MESSAGES:
        text = f"The newest {_MOST_MESSAGES} of {len(messages):,}."
        add(section, "p", text, class_="note")
    messages = messages[-_MOST_MESSAGES:]
    rows: list[list[Cell | str]] = [
        [
            Cell(runs[index].name, run=index, swatch=True),
            Cell(format_time(message.wall_time or None), message.wall_time),
            *make_counts(message.attempt or None),
            *make_counts(message.step),
            message.source,
            message.text,
        ]
        for message, index in messages
    ]
    header = ["run", "time", "attempt", "step", "source", "message"]
    add_table(section, header, rows, [index for _, index in messages])


def add_environment(main: Element, runs: Sequence[Run]) -> None:
    """Add everything that is known of what each run is made of, and where it ran."""
    section = add_section(main, "environment", "Configuration and environment")
    for index, run in enumerate(runs):
        details = add(section, "details", data_run=str(index))
        if len(runs) == 1:
            details.set("open", "open")
        add_swatch(add(details, "summary"), index).tail = as_printable(
            f"{run.name}, {run.path.absolute()}"
        )
        rows = [[as_printable(name), format_value(value)] for name, value in describe(run).items()]
        environment = run.configs.get("environment", {})
        rows += [
            [f"environment.{as_printable(name)}", format_value(value)]
            for name, value in environment.items()
        ]
        if rows:
            add_table(details, ["name", "value"], rows)
        for name, text in run.texts.items():
            block = add(details, "details")
            add(block, "summary", name)
            add(block, "pre", text[:_MOST_TEXT], tabindex="0")
