"""The page of runs, as a file."""

import base64
import json
import re
import struct
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fulgurite_report import ReportError, find_runs, write_report
from fulgurite_report.command import report
from fulgurite_report.text import format_seconds, format_size
from fulgurite_report.view import View
from pages import write_page
from PIL import Image
from rich.console import Console, ConsoleDimensions
from run_files import HOSTILE, make_manifest, make_telemetry, write_run
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]


def test_values_are_those_of_the_records_and_only_what_differs_is_compared(tmp_path: Path) -> None:
    values = {name: [(step, 1 / step / rate) for step in (10, 20, 30)] for name, rate in
              (("a", 0.1), ("b", 0.3))}  # fmt: skip
    runs = [
        write_run(
            tmp_path / name,
            records=[("test", step, {"loss": value}) for step, value in points],
            manifest=make_manifest(lr=len(name) * ord(name), width=8),
        )
        for name, points in values.items()
    ]
    page = write_page(tmp_path, *runs)
    assert page.get_points(0, "test/loss") == values["a"]
    assert page.get_points(1, "test/loss") == values["b"]
    differences = page.texts["differences"]
    assert differences[2:] == ["a", "b", "lr", "97", "98"]
    assert "width" in page.texts["environment"]


def test_finished_killed_running_and_empty_runs_have_a_page(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / state, state=state, records=[("train", 10, {"loss": 1.0})])
        for state in ("complete", "killed", "running")
    ]
    (tmp_path / "empty").mkdir()
    (tmp_path / "silent").mkdir()
    runs += [tmp_path / "empty", write_run(tmp_path / "silent", state="stopped")]
    summary = write_page(tmp_path, *runs).texts["summary"]
    assert "killed: was killed: it never recorded that it ended" in summary
    assert "running: is running: make the page again for what is new" in summary
    assert "empty: has not begun: there is no attempt in its directory" in summary
    assert "silent: has no records of numbers: they come with the plugin 'jsonl'" in summary
    assert write_page(tmp_path, tmp_path / "empty").texts["curves"][-1] == (
        "There are no records of numbers."
    )


def test_numbers_that_are_not_finite_are_there_and_said(tmp_path: Path) -> None:
    records = [("train", 1, {"loss": 0.1}), ("train", 2, {"loss": {"$float": "nan"}})]
    page = write_page(tmp_path, write_run(tmp_path / "run", records=records))
    assert str(page.get_points(0, "train/loss")) == "[(1, 0.1), (2, nan)]"
    assert (
        "run: train/loss is not finite at 1 of 2 points, first at step 2" in page.texts["summary"]
    )


def test_members_of_a_population_share_a_chart(tmp_path: Path) -> None:
    records = [
        ("train", step, {"loss[0]": 1.0, "loss[1]": 2.0, "accuracy": 0.5}) for step in (1, 2)
    ]
    page = write_page(tmp_path, write_run(tmp_path / "run", records=records))
    charts = {curve["name"]: curve["chart"] for curve in page.data["curves"]}
    assert charts == {
        "train/loss[0]": "train/loss",
        "train/loss[1]": "train/loss",
        "train/accuracy": "train/accuracy",
    }


@pytest.mark.full
def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    records = [("train", step, {"loss": step % 7 + step / 1e5}) for step in range(1, 100_001)]
    page = write_page(tmp_path, write_run(tmp_path / "run", records=records))
    points = page.get_points(0, "train/loss")
    assert len(points) < 3_000
    assert all(value == step % 7 + step / 1e5 for step, value in points)
    assert max(value for _, value in points) == max(
        step % 7 + step / 1e5 for step in range(100_001)
    )
    assert page.data["curves"][0]["total"] == 100_000
    assert (tmp_path / "page.html").stat().st_size < 2e6
    assert "1 of 1 curves have more points than a screen can show" in page.texts["curves"][1]


def test_what_a_hostile_run_holds_is_text(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "\u2215")
    manifest = make_manifest(**{HOSTILE: HOSTILE})
    manifest["model"] = [HOSTILE]
    manifest["plugins"] = [{"name": HOSTILE, "settings": {HOSTILE: [HOSTILE]}, "version": HOSTILE}]
    telemetry = [
        make_telemetry(1, 5.0, {"message": HOSTILE + "\u202e\x1b", HOSTILE: HOSTILE}, kind="text"),
        make_telemetry(1, 6.0, {HOSTILE: HOSTILE}, kind="config") | {"source": "environment"},
    ]
    write_run(
        folder,
        records=[(HOSTILE, 1, {HOSTILE: 1.0, "loss": 2.0})],
        telemetry=telemetry,
        manifest=manifest,
    )
    other = write_run(tmp_path / "other", records=[("train", 1, {"loss": 1.0})])
    page = write_page(tmp_path, folder, other)
    assert (page.tags["script"], page.tags["img"], page.tags["style"]) == (3, 0, 2)
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert {curve["name"] for curve in page.data["curves"]} >= {f"{HOSTILE}/{HOSTILE}"}
    for section in ("summary", "differences", "values", "messages", "environment"):
        assert any(HOSTILE[:20] in text for text in page.texts[section]), section
    assert HOSTILE + "\\u202e\\u001b" in page.texts["messages"]


def test_nothing_leads_out_of_the_page(tmp_path: Path) -> None:
    page = write_page(tmp_path, write_run(tmp_path / "run", records=[("train", 1, {"loss": 1.0})]))
    links = [value or "" for name, value in page.attributes if name in ("src", "href", "action")]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    text = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"\w+://[^\s\"'<>]*", text)) == {"https://github.com/leeoniya/uPlot"}
    assert "Permission is hereby granted, free of charge" in text
    (policy,) = [
        value for name, value in page.attributes if (value or "").startswith("default-src")
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_times_starts_messages_and_checkpoints_are_shown(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        records=[("test", step, {"loss": 1 / step}) for step in (10, 20)],
        telemetry=[
            make_telemetry(0, 1e9, {"message": "hello"}, kind="text"),
            make_telemetry(20, 1e9 + 90, {"steps_per_second": 0.5}),
        ],
    )
    checkpoint = run / "checkpoints" / "step-20"
    checkpoint.mkdir(parents=True)
    commit = {
        "step": 20, "attempt": 1, "metrics": {"test": {"loss": 0.05}}, "wall_time": 1e9,
        "monitor": ["test/loss", "min"],
        "timings": {"dispatch": 2.0, "wait": 4.0, "evaluate.test": 2.0, "jsonl.log_record": 2.0},
    }  # fmt: skip
    (checkpoint / "COMMIT").write_text(json.dumps(commit))
    page = write_page(tmp_path, run)
    time = page.texts["time"]
    assert " run time 1 min 30 s, parts as of the newest checkpoint" in time
    parts = {"steps 6 s, 6.7%", "evaluating test 2 s, 2.2%", "plugin jsonl 2 s, 2.2%"}
    assert parts | {"not recorded 1 min 20 s, 88.9%"} <= {*time}
    assert page.texts["messages"][-1] == "hello"
    assert page.texts["checkpoints"][-2:] == ["test/loss", "0.05"]
    assert "test/loss 0.05" in page.texts["summary"]


def test_repeated_steps_are_counted_from_where_an_attempt_began(tmp_path: Path) -> None:
    run = tmp_path / "run"
    starts = {1: 0, 2: 40, 3: 40, 4: 95}
    reached = {1: range(10, 91, 10), 2: (), 3: range(50, 101, 10), 4: range(100, 121, 10)}
    for attempt, start_step in starts.items():
        manifest = make_manifest() | {"began": 1e9 + attempt, "start_step": start_step}
        write_run(
            run,
            attempt=attempt,
            manifest=manifest,
            telemetry=[
                make_telemetry(step, 1e9 + attempt + step / 1000, {"rate": 1.0}, attempt=attempt)
                for step in reached[attempt]
            ],
        )
    page = write_page(tmp_path, run)
    texts = page.texts["time"]
    table = texts[texts.index("repeated steps") + 1 :]
    # The second was killed before it logged anything: nothing is known of it but its start. The
    # third did 50 again that the first had done, the fourth those from 95 to 100.
    assert [text for text in table if text.replace(",", "").isdecimal()] == [
        "1", "0", "90", "0",
        "2", "40", "0",
        "3", "40", "100", "50",
        "4", "95", "120", "5",
    ]  # fmt: skip


def test_a_message_of_the_exact_records_has_no_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[("train", 10, {"loss": 1.0})])
    line = {"kind": "text", "source": "mine", "step": 10, "values": {"message": "hello"}}
    with open(run / "records.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    assert write_page(tmp_path, run).texts["messages"][-4:] == ["run", "10", "mine", "hello"]


def test_a_directory_in_place_of_the_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "pages").mkdir()
    for path in (tmp_path / "pages", Path()):
        with pytest.raises(ReportError, match="is a directory: give a file, such as"):
            write_report([run], path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "run"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(0.9994), "999 ms"),
        (format_seconds(0.9996), "1 s"),
        (format_size(999.4e3), "999 kB"),
        (format_size(999.6e3), "1 MB"),
    ],
)
def test_what_is_rounded_up_to_a_thousand_has_the_next_unit(text: str, expected: str) -> None:
    assert text == expected


def test_pictures_of_event_files_are_in_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[("train", 1, {"loss": 1.0})])
    folder = run / "tensorboard" / "train"
    folder.mkdir(parents=True)
    Image.new("L", (4, 4), 99).save(tmp_path / "picture.png")
    png = (tmp_path / "picture.png").read_bytes()
    with open(folder / "events.out.tfevents.1", "wb") as file:
        for step in range(12):
            event = Event(step=step, wall_time=1.0)
            event.summary.value.add(tag="loss", simple_value=1.0)
            for index in range(2):
                image = event.summary.value.add(tag=f"samples/{index}").image
                image.encoded_image_string = png
            data = event.SerializeToString()
            file.write(struct.pack("<QI", len(data), 0) + data + struct.pack("<I", 0))
        file.write(b"\xff" * 30)
    page = write_page(tmp_path, run)
    sources = [value for name, value in page.attributes if name == "src"]
    assert sources == [f"data:image/png;base64,{base64.b64encode(png).decode()}"] * 16
    assert page.texts["media"][2:4] == ["run train/samples", "step 11"]


def test_mistakes_are_answered_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(tmp_path / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    assert report([str(run), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ReportError, match="cannot be written"):
        write_report([run], tmp_path / "no" / "page.html")


def test_goodput_is_shown_where_the_run_logged_it(tmp_path: Path) -> None:
    values = {"goodput": 0.5, "steps_seconds": 50.0, "lost_seconds": 30.0, "down_seconds": 20.0,
              "data_seconds": 0.0}  # fmt: skip
    telemetry = [make_telemetry(20, 1e9, values) | {"source": "goodput"}]
    page = write_page(tmp_path, write_run(tmp_path / "run", telemetry=telemetry))
    assert {"steps 50 s, 50.0%", "lost steps 30 s, 30.0%", "down 20 s, 20.0%"} <= {
        *page.texts["time"]
    }
    assert (
        " run time 1 min 20 s, goodput 50.0%: the share of the bar for steps that were kept"
        in page.texts["time"]
    )
    assert "goodput" in page.texts["summary"]


@pytest.mark.parametrize("has_goodput", [True, False])
def test_run_time_is_the_same_number_wherever_it_is_shown(
    tmp_path: Path, has_goodput: bool
) -> None:
    """Two attempts, which lived 25 s and 35 s, the first 2 s of each before their fits."""
    run = tmp_path / "run"
    for attempt, began, last in ((1, 1000.0, 1020.0), (2, 1100.0, 1135.0)):
        telemetry = [
            make_telemetry(step, wall_time, {"steps_per_second": 1.0}, attempt=attempt)
            for step, wall_time in ((10 * attempt, began + 5), (20 * attempt, last))
        ]
        manifest = make_manifest() | {"began": began, "fit_began": began + 2}
        write_run(run, telemetry=telemetry, manifest=manifest, attempt=attempt)
    # The first one was alive for 5 s more than its records say.
    checkpoint = run / "checkpoints" / "step-20"
    checkpoint.mkdir(parents=True)
    commit = {"step": 20, "attempt": 1, "metrics": {}, "wall_time": 1025.0, "monitor": None}
    (checkpoint / "COMMIT").write_text(
        json.dumps(commit | {"timings": {"wait": 20.0, "start": 3.0}})
    )
    if has_goodput:
        values = {"goodput": 0.25, "steps_seconds": 30.0, "down_seconds": 75.0}
        write_run(
            run,
            telemetry=[make_telemetry(40, 1135.0, values, attempt=2) | {"source": "goodput"}],
            manifest=make_manifest() | {"began": 1100.0},
            attempt=2,
        )
    page = write_page(tmp_path, run)
    assert "cost: 1 min 0 s of run time on 1 x cpu" in page.texts["summary"]
    assert page.texts["summary"].count("1 min 0 s") == 1
    time = page.texts["time"]
    assert any(text.startswith(" run time 1 min 0 s") for text in time)
    assert {"25 s", "35 s"} <= {*time}
    parts = ["steps 30 s", "not recorded 30 s", "down 1 min 15 s"]
    if not has_goodput:
        parts = ["steps 20 s", "starting 7 s", "not recorded 33 s"]
    assert [text.rpartition(",")[0] for text in time if text.endswith("%")] == parts
    (shown,) = find_runs([run])
    shown.refresh()
    console = Console(width=120, height=30, record=True, file=StringIO())
    console.print(View([shown]).build(ConsoleDimensions(120, 30)))
    assert "1 min 0 s" in console.export_text()


def test_arguments_have_short_names_and_followers_of_others_no_column(tmp_path: Path) -> None:
    def make_values(rate: float, width: int, depth: int) -> dict[str, Any]:
        return {
            "rate": rate,
            "engine.plugins.3.every": 5,
            "schedule.decay.peak_value": rate,
            "model.encoder.width": width,
            "model.decoder.width": depth,
            "model.head.cfg.size": width,
            HOSTILE: 3 * rate,
            "data.files": f"/data/{rate}/" + 100 * "x",
        }

    runs = [
        write_run(
            tmp_path / name,
            manifest=make_manifest()
            | {"configuration": {"config": "train:experiment", "values": make_values(*values)}},
        )
        for name, values in (("a", (0.1, 8, 2)), ("b", (0.2, 16, 4)))
    ]
    page = write_page(tmp_path, *runs)
    titles = [value for name, value in page.attributes if name == "title"]
    assert "rate\nschedule.decay.peak_value" in titles
    assert "model.encoder.width\nmodel.head.cfg.size" in titles
    assert "data.files" in titles
    assert f"/data/0.1/{100 * 'x'}" in titles
    summary = page.texts["summary"]
    assert {"rate", "encoder.width", "decoder.width", "files"} <= {*summary}
    assert not {"every", "peak_value", "size"} & {*summary}
    # All of them are in the table of differences.
    assert "schedule.decay.peak_value" in page.texts["differences"]


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("state", ["complete", "running", "killed"])
def test_a_run_of_hardly_any_steps_has_a_page(tmp_path: Path, state: str, num_steps: int) -> None:
    records = [("train", step, {"loss": 1.0}) for step in range(1, num_steps + 1)]
    page = write_page(tmp_path, write_run(tmp_path / "run", records=records, state=state))
    assert len(page.data["curves"]) == num_steps
    assert state in page.texts["summary"]


def test_an_attempt_that_was_killed_before_it_wrote_anything_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state="killed")
    (run / "attempts" / "1").write_text("")
    (run / "records.jsonl").unlink()
    (run / "telemetry.jsonl").unlink()
    assert (
        "run: was killed: it never recorded that it ended"
        in write_page(tmp_path, run).texts["summary"]
    )


def test_a_hundred_runs_are_a_page(tmp_path: Path) -> None:
    for number in range(100):
        records = [("train", step, {"loss": 1 / step + number}) for step in (1, 2, 3)]
        manifest = make_manifest(lr=number / 100, seed=number % 3)
        write_run(tmp_path / "sweep" / f"lr={number}", records=records, manifest=manifest)
    page = write_page(tmp_path, tmp_path / "sweep")
    assert len(page.data["runs"]) == len(page.data["curves"]) == 100
    assert page.get_points(99, "train/loss")[0][0] == 1
    assert (tmp_path / "page.html").stat().st_size < 2e6


VALUES = (None, True, -1, 2**70, 1e308, "x", [], [1], {}, {"$float": "x"}, {"$array": 3}, {"a": {}})


def iter_edited(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object with another value in each place in turn."""
    for name in content:
        for value in VALUES:
            yield content | {name: value}


@pytest.mark.slow
def test_files_that_were_edited_are_no_error(tmp_path: Path) -> None:
    """Whatever JSON they hold."""
    run = write_run(tmp_path / "run", records=[("train", 1, {"loss": 1.0})])
    (run / "evaluations").mkdir()
    result = {"evaluator": "side", "step": 1, "commit": "", "metrics": {"loss": 1.0}}
    lines = [*iter_edited(result), *({**result, "metrics": {"loss": value}} for value in VALUES)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "evaluations" / "group.jsonl").write_text(text)
    for kind, name in (("scalars", "rate"), ("text", "message"), ("config", "x"), (3, "y")):
        record = make_telemetry(1, 1e9, {name: 1.0}) | {"kind": kind}
        edited = [{**record, "values": {name: value}} for value in VALUES]
        write_run(run, telemetry=[*iter_edited(record), *edited])
    commit = {
        "step": 1, "attempt": 1, "metrics": {"a": {"b": 1.0}}, "monitor": ["train/loss", "min"],
        "timings": {"wait": 1.0}, "wall_time": 1e9,
    }  # fmt: skip
    for step, edited_commit in enumerate(iter_edited(commit)):
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "COMMIT").write_text(json.dumps(edited_commit))
    owner = json.loads((run / "lock").read_text())
    (run / "goodput").mkdir()
    for note in iter_edited({"last_alive": 1e9}):
        (run / "goodput" / "1").write_text(json.dumps(note))
        write_page(tmp_path, run)
    for manifest in iter_edited(make_manifest() | {"began": 1e9, "fit_began": 1e9}):
        (run / "attempts" / "1").write_text(json.dumps(manifest))
        page = write_page(tmp_path, run)
        assert page.get_points(0, "train/loss") == [(1, 1.0)]
    for edited_owner in iter_edited(owner):
        (run / "lock").write_text(json.dumps(edited_owner))
        write_page(tmp_path, run)
