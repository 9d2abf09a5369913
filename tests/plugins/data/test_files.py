"""Images, tables and records: what is in the files, in any order, and what is wrong with them."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import ArrayRecords, Images, JSONLines, Parquet, Ragged, mix
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


@pytest.mark.parametrize("threads", [None, 0, 3])
def test_images_have_the_labels_of_their_folders(tmp_path: Path, threads: int | None):
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


def test_scaled_images_are_exact_unless_a_draft_is_asked_for(tmp_path: Path):
    path = tmp_path / "photo.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (20, 25, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((400, 300)).save(path, quality=90)
    with Image.open(path) as photo:
        exact = np.asarray(photo.resize((80, 60)))
    with Image.open(path) as photo:
        photo.draft("RGB", (80, 60))
        assert photo.size == (100, 75)  # a quarter: what libjpeg decodes at once
        rough = np.asarray(photo.resize((80, 60)))
    images = Images(tmp_path, size=(60, 80))
    drafts = Images(tmp_path, size=(60, 80), draft=True)
    assert np.array_equal(images.get(0)["image"], exact)
    assert np.array_equal(drafts.get(0)["image"], rough)
    assert 0 < np.abs(exact - rough.astype(float)).mean() < 3
    assert drafts.batch(1).get_identity() != images.batch(1).get_identity()
    with pytest.raises(ConfigurationError, match="draft=True decodes at a size"):
        Images(tmp_path, draft=True)


def test_images_are_decoded_by_threads_unless_processes_are_asked_for(tmp_path: Path):
    write_images(tmp_path)
    names: set[str] = set()

    def note(example: Any) -> Any:
        names.add(threading.current_thread().name.partition("_")[0])
        return example

    list(Images(tmp_path).map(note).batch(2))
    assert names == {"fulgurite-data"}
    names.clear()
    list(Images(tmp_path, threads=0).map(note).batch(2))
    assert names == {"MainThread"}
    Images(tmp_path).map(dict, processes=2)
    with pytest.raises(ConfigurationError, match="threads and for processes"):
        Images(tmp_path, threads=2).map(dict, processes=2)
    with pytest.raises(ConfigurationError, match="threads and for processes"):
        mix([Images(tmp_path, threads=2), Images(tmp_path).map(dict, processes=2)])


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


def test_an_image_too_large_for_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"the image .*a\.png cannot be read: Image size \(3600"):
        Images(tmp_path).get(0)


def write_pixel(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2)).save(path)


def test_a_folder_without_images_is_refused_unless_classes_are_named(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b/1.png", "c/2.png"):
        write_pixel(tmp_path / name)
    with pytest.raises(DataError, match=r"a has no images.*remove it, or give Images\(classes=\)"):
        Images(tmp_path)
    images = Images(tmp_path, classes=["a", "c", "d", "b"])
    assert images.classes == ["a", "c", "d", "b"]
    assert images.batch(2).read(0)["label"].tolist() == [3, 1]
    others = Images(tmp_path, classes=["a", "b", "c"]).batch(2)
    assert others.get_identity() != images.batch(2).get_identity()
    with pytest.raises(DataError, match="the folder c with images, and classes are a, b"):
        Images(tmp_path, classes=["a", "b"])
    with pytest.raises(ConfigurationError, match="must be the different names of folders"):
        Images(tmp_path, classes="abc")
    with pytest.raises(DataError, match="images in no folder, and classes are a"):
        Images(tmp_path / "b", classes=["a"])


def test_images_are_found_where_links_lead_and_not_in_hidden_folders(tmp_path: Path):
    for name in (
        "pets/dog/1.png",
        "pets/.checkpoints/1.png",
        "pets/dog/.cache/2.png",
        "other/3.png",
    ):
        write_pixel(tmp_path / name)
    (tmp_path / "pets" / "cat").symlink_to(tmp_path / "other", target_is_directory=True)
    (tmp_path / "other" / "again").symlink_to(tmp_path / "other", target_is_directory=True)
    images = Images(tmp_path / "pets")
    assert images.classes == ["cat", "dog"]
    assert [str(path) for path in images.node.paths] == ["cat/3.png", "dog/1.png"]
    assert images.batch(2).read(0)["label"].tolist() == [0, 1]


def test_images_of_more_than_a_byte_are_refused(tmp_path: Path):
    Image.fromarray(np.array([[0, 256], [1000, 65535]], np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(np.array([[0.5, 3.0]], np.float32)).save(tmp_path / "b.tiff")
    images = Images(tmp_path, mode="L")
    for number, name in enumerate(("a.png", "b.tiff")):
        with pytest.raises(DataError, match=f"{name} is of Pillow's mode .*larger than a byte"):
            images.get(number)


@pytest.mark.parametrize("size", [None, (8, 6)])
def test_images_are_upright_as_their_exif_says(tmp_path: Path, size: Any):
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[:, 4:] = 255  # the right half
    exif = Image.Exif()
    exif[0x0112] = 6  # held so that its left side was up: turn it clockwise to see it
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    image = Images(tmp_path, size=size).get(0)["image"]
    assert image.shape == (8, 6, 3)
    assert (image[:4] == 0).all()
    assert (image[4:] == 255).all()


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


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n", "\n\n\r\n \n"])
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
    path.write_text('{"x": 1}\n{"x": [1, 2')
    with pytest.raises(DataError, match=r"line 2 of .*a\.jsonl is not JSON, or .* truncated: "):
        JSONLines(path)
    path.write_text("")
    with pytest.raises(DataError, match="there are no lines"):
        JSONLines(path)
    with pytest.raises(DataError, match=r"gone\.jsonl is missing"):
        JSONLines(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigurationError, match="at least one file"):
        JSONLines([])


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    return path


def test_lines_of_several_dtypes_are_refused_or_made_one(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [1, 2, 3.5])
    message = r"data\['x'\] is float64 in line 3 of .*a\.jsonl, and int64 in example 0.*dtypes="
    for order in ([2], [1, 2], [2, 0]):
        with pytest.raises(DataError, match=message):
            JSONLines(path).read(order)
    floats = JSONLines(path, dtypes={"x": "float32"})
    assert [batch["x"].tolist() for batch in floats.batch(1)] == [[1], [2], [3.5]]
    assert floats.read([0])["x"].dtype == np.float32
    assert floats.batch(1).get_identity() != JSONLines(path).batch(1).get_identity()
    with pytest.raises(
        DataError, match=r"'x' in line 3 of .*a\.jsonl is 3\.5, which int32 does not"
    ):
        JSONLines(path, dtypes={"x": "int32"}).get(2)


def test_lists_of_json_without_a_number_have_the_dtype_of_others(tmp_path: Path):
    lists = JSONLines(write_lines(tmp_path / "a.jsonl", [[1, 2], [], [3]]))
    assert lists.read([1])["x"].dtype == np.int64
    empty = write_lines(tmp_path / "b.jsonl", [[], [1, 2]])
    with pytest.raises(DataError, match=r"example 0 .*data\['x'\] is an empty list") as caught:
        JSONLines(empty).read([1])
    assert "dtypes=" in "".join(caught.value.__notes__)
    rows = JSONLines(empty, dtypes={"x": "int32"}).read([0, 1])["x"]
    assert [row.tolist() for row in rows.split()] == [[], [1, 2]]
    assert rows.values.dtype == np.int32


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (2**40, "int32", "1099511627776, which int32 does not hold"),
        (-1, "uint8", "-1, which uint8 does not hold"),
        (None, "int32", "None, and not of numbers"),
        ("7", "int32", "'7', and not of numbers"),
        ([[1], [2, 3]], "int32", "cannot be an array"),
        (2, "bool", "2, which bool does not hold"),
        (70_000, "float16", "70000, which float16 does not hold"),
        ([1, 1e300], "float32", r"\[1, 1e\+300\], which float32 does not hold"),
    ],
)
def test_a_number_that_a_dtype_does_not_hold_is_refused(
    tmp_path: Path, value: Any, dtype: str, message: str
):
    path = write_lines(tmp_path / "a.jsonl", [1, value])
    with pytest.raises(DataError, match=f"'x' in line 2 of .*{message}"):
        JSONLines(path, dtypes={"x": dtype}).get(1)


def test_dtypes_of_lines_are_of_keys_and_of_numbers(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [1])
    with pytest.raises(DataError, match="line 1 of .* lacks some of y"):
        JSONLines(path, dtypes={"y": "int32"}).get(0)
    for dtype in ("number", "U3"):
        with pytest.raises(ConfigurationError, match="JSONLines: the dtype of 'x'"):
            JSONLines(path, dtypes={"x": dtype})


def test_integers_beyond_32_bits_in_lines_are_refused_as_those_of_arrays(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [1, 2**40])
    with pytest.raises(DataError, match=r"data\['x'\]"):
        JSONLines(path).batch(1).read(1)
    with pytest.raises(DataError, match=r"data\['x'\] is uint64 in line 2"):
        JSONLines(write_lines(path, [1, 2**63])).batch(1).read(1)


def test_columns_of_several_types_are_refused(tmp_path: Path):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, kind in zip(paths, (pa.int32(), pa.float32()), strict=True):
        pq.write_table(pa.table({"x": pa.array([1, 2], kind), "y": [1, 2]}), path)
    with pytest.raises(DataError, match=r"'x' is float in .*b\.parquet, and int32 in .*a\.parquet"):
        Parquet(paths)
    assert Parquet(paths, columns=["y"]).read([0, 3])["y"].tolist() == [1, 2]


def test_lists_of_several_lengths_within_lists_are_refused_whatever_the_outer_ones_are(
    tmp_path: Path,
):
    path = tmp_path / "a.parquet"
    for rows in ([[[1, 2], [3, 4, 5]], [[6]]], [[[1, 2], [3]], [[4, 5], [6]]]):
        pq.write_table(pa.table({"x": rows}), path)
        with pytest.raises(DataError, match="'x' .* has lists of 1 to [23] values within lists"):
            Parquet(path).read([0, 1])


def test_rows_without_any_inner_list_join_those_with_some(tmp_path: Path):
    boxes = [[[1, 2]], [[3, 4], [5, 6]], [], []]
    for name, kind in (("list", pa.list_(pa.int64())), ("fixed", pa.list_(pa.int64(), 2))):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"x": pa.array(boxes, pa.list_(kind))}), path, row_group_size=2)
        ragged = Parquet(path).read([3, 1, 0, 2])["x"]
        assert [row.tolist() for row in ragged.split()] == [[], boxes[1], boxes[0], []]
    padded = Parquet(tmp_path / "fixed.parquet").pad(2)
    assert (padded.read([2, 3])["x"] == np.zeros((2, 2, 2))).all()


def test_categories_are_the_strings_that_they_stand_for(tmp_path: Path):
    column = pa.array(["ab", "c", "ab"]).dictionary_encode()
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    names = Parquet(tmp_path / "a.parquet").read([2, 1])["x"]
    assert names.dtype.kind == "U"
    assert names.tolist() == ["ab", "c"]


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
