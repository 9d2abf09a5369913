"""Images, tables and records: what is in the files, in any order, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import ArrayRecords, Images, JSONLines, Parquet, Ragged
from PIL import Image


def write_images(folder: Path) -> dict[str, np.ndarray]:
    """Write two images of each of two classes, and return their pixels by path."""
    rng = np.random.default_rng(0)
    pixels = {}
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/sub/3.bmp"):
        pixels[name] = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[name]).save(path)
    (folder / "cat" / "notes.txt").write_text("no image")
    return pixels


@pytest.mark.parametrize("threads", [0, 3])
def test_images_have_the_labels_of_their_folders(tmp_path: Path, threads: int):
    pixels = write_images(tmp_path)
    images = Images(tmp_path, threads=threads)
    assert images.classes == ["cat", "dog"]
    (batch,) = images.batch(4)
    assert batch["label"].tolist() == [0, 0, 1, 1]
    assert (batch["image"] == np.stack([*pixels.values()])).all()
    grey = Images(tmp_path, mode="L").get(0)["image"]
    assert (grey[..., 0] == np.asarray(Image.open(tmp_path / "cat/1.png").convert("L"))).all()


def test_images_are_scaled_to_one_size_if_asked(tmp_path: Path):
    write_images(tmp_path)
    Image.new("RGB", (50, 20), (10, 20, 30)).save(tmp_path / "dog" / "0.jpg")
    with pytest.raises(DataError, match=r"several shapes.*\(6, 8, 3\).*|.*give Images\(size=\)"):
        Images(tmp_path).batch(5).read(0)
    batch = Images(tmp_path, size=(4, 5)).batch(5).read(0)
    assert batch["image"].shape == (5, 4, 5, 3)
    assert batch["image"][2, 0, 0].tolist() == pytest.approx([10, 20, 30], abs=3)


def test_images_without_classes_have_no_label(tmp_path: Path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    assert [*Images(tmp_path).get(0)] == ["image"]
    (tmp_path / "sub").mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "sub" / "b.png")
    with pytest.raises(DataError, match="not clear whether folders are classes"):
        Images(tmp_path)


def test_what_is_wrong_with_images_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="gone is missing"):
        Images(tmp_path / "gone")
    with pytest.raises(DataError, match="has no images"):
        Images(tmp_path)
    path = tmp_path / "a.png"
    Image.new("RGB", (60, 60), (1, 2, 3)).save(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"the image .*a\.png cannot be read"):
        Images(tmp_path).batch(1).read(0)
    with pytest.raises(ConfigurationError, match=r"must be \(height, width\)"):
        Images(tmp_path, size=32)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Images: mode is 'HSV'"):
        Images(tmp_path, mode="HSV")


def write_tables(folder: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Write two Parquet files of several groups of rows, and return their rows."""
    rows = [
        {"id": i, "x": i / 2, "tokens": [*range(i % 4)], "pair": [i, -i], "text": f"row {i}"}
        for i in range(25)
    ]
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("x", pa.float32()),
            ("tokens", pa.list_(pa.int32())),
            ("pair", pa.list_(pa.int64(), 2)),
            ("text", pa.string()),
        ]
    )
    paths = [folder / "a.parquet", folder / "b.parquet"]
    for path, part in zip(paths, (rows[:18], rows[18:]), strict=True):
        pq.write_table(pa.Table.from_pylist(part, schema), path, row_group_size=5)
    return paths, rows


def test_rows_of_parquet_files_are_read_in_any_order(tmp_path: Path):
    paths, rows = write_tables(tmp_path)
    dataset = Parquet(paths)
    assert len(dataset) == 25
    order = np.random.default_rng(0).permutation(25)
    batch = dataset.read(order)
    assert batch["id"].tolist() == order.tolist()
    assert batch["x"].dtype == np.float32
    assert batch["x"].tolist() == [i / 2 for i in order]
    assert isinstance(batch["tokens"], Ragged)
    assert [row.tolist() for row in batch["tokens"].split()] == [rows[i]["tokens"] for i in order]
    assert batch["pair"].tolist() == [[i, -i] for i in order]
    assert batch["text"].tolist() == [f"row {i}" for i in order]
    some = Parquet(paths, columns=["x", "id"]).shuffle().batch(5)
    assert sorted(i for b in some for i in b["id"].tolist()) == [*range(25)]
    assert {*some.read(0)} == {"x", "id"}
    with pytest.raises(DataError, match=r"data\['text'\].*encode it first"):
        dataset.map(lambda row: {"text": row["text"]}).batch(5).read(0)


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path):
    paths, _ = write_tables(tmp_path)
    with pytest.raises(DataError, match=r"gone\.parquet is missing"):
        Parquet([*paths, tmp_path / "gone.parquet"])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'y'; there are: id, x"):
        Parquet(paths, columns=["y"])
    paths[1].write_bytes(paths[1].read_bytes()[:-10])
    with pytest.raises(DataError, match=r"b\.parquet is not a Parquet file, or truncated"):
        Parquet(paths)
    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"column 'x' of .*c\.parquet has 1 missing values"):
        Parquet(tmp_path / "c.parquet").get(0)
    pq.write_table(pa.table({"x": pa.array([], pa.int32())}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="there are no rows"):
        Parquet(tmp_path / "d.parquet")

    def fail(row: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        Parquet(write_tables(tmp_path)[0]).map(fail).read([20])
    assert caught.value.__notes__[0].endswith("of row 2 of " + str(paths[1]))


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n"])
def test_lines_of_json_are_read_in_any_order(tmp_path: Path, end: str):
    rows = [{"tokens": [*range(i)], "label": i, "text": "ü" * i} for i in range(1, 8)]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    paths[0].write_text("\n".join(json.dumps(row) for row in rows[:4]) + end.replace("\r\n", ""))
    paths[1].write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows[4:]) + end[:1]
    )
    dataset = JSONLines(paths)
    assert len(dataset) == 7
    order = np.array([6, 0, 4, 3])
    batch = dataset.read(order)
    assert batch["label"].tolist() == [7, 1, 5, 4]
    assert [row.tolist() for row in batch["tokens"].split()] == [rows[i]["tokens"] for i in order]
    assert batch["text"].tolist() == ["ü" * i for i in (7, 1, 5, 4)]
    packed = JSONLines(paths, columns=["tokens"]).pack(28, how="split")
    assert packed.get(0)["tokens"].tolist() == [n for row in rows for n in row["tokens"]]


def test_what_is_wrong_with_a_line_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": \n{"y": 3}\n')
    with pytest.raises(DataError, match=r"line 2 of .*a\.jsonl is not JSON"):
        JSONLines(path).get(1)
    with pytest.raises(DataError, match=r"line 3 of .*a\.jsonl lacks some of x"):
        JSONLines(path, columns=["x"]).get(2)
    with pytest.raises(DataError, match="several structures"):
        JSONLines(path).read([0, 2])
    path.write_text("")
    with pytest.raises(DataError, match="there are no lines"):
        JSONLines(path)
    with pytest.raises(DataError, match=r"gone\.jsonl is missing"):
        JSONLines(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigurationError, match="at least one file"):
        JSONLines([])


def decode(record: bytes) -> Any:
    return {"x": np.frombuffer(record, np.int32)}


def test_records_are_read_in_any_order_and_decoded(tmp_path: Path):
    paths = [tmp_path / "a.array_record", tmp_path / "b.array_record"]
    for number, path in enumerate(paths):
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in range(4):
            writer.write(np.array([number, row], np.int32).tobytes())
        writer.close()
    dataset = ArrayRecords(paths, decode=decode)
    assert dataset.read([7, 0, 5])["x"].tolist() == [[1, 3], [0, 0], [1, 1]]
    batches = dataset.shuffle().batch(8)
    assert sorted(batches.read(0)["x"].tolist()) == [[n, row] for n in range(2) for row in range(4)]
    with pytest.raises(DataError, match="gone is missing"):
        ArrayRecords(tmp_path / "gone", decode=decode)
    (tmp_path / "bad.array_record").write_bytes(b"no records")
    with pytest.raises(DataError, match="cannot be read"):
        ArrayRecords(tmp_path / "bad.array_record", decode=decode)
