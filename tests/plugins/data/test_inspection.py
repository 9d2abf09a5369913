"""What the command `fulgurite data` and the display of a run say about data."""

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite_cli.command import main
from fulgurite_data import Arrays, Items, Tokens, inspection, write_tokens
from fulgurite_data.command import print_report
from fulgurite_data.counting import count_examples, count_tokens
from fulgurite_data.inspection import describe_data
from fulgurite_data.pictures import as_pixels
from fulgurite_data.tokens import TokenNode
from fulgurite_progress.line import Line
from PIL import Image

PROGRAM = """
import fulgurite as fg
import numpy as np
from fulgurite_cli import Experiment
from fulgurite_data import Arrays
from types import SimpleNamespace


def double(example):
    return {**example, "x": 2 * example["x"]}


def load(size):
    examples = Arrays({"x": np.arange(30, dtype=np.float32), "id": np.arange(30)})
    train = examples.map(double).batch(size, remainder="pad")
    return SimpleNamespace(train=train, evaluations={"test": examples.take(6).batch(3)})


def experiment(size: int = 8, broken: bool = False) -> Experiment:
    data = None if broken else lambda: load(size)
    return Experiment(fg.Engine(epochs=1), model=None, data=data)
"""


def test_command_shows_stages_length_and_first_batch(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert main(["data", str(program), "size=10"]) == 0
    shown = capsys.readouterr().out
    assert "  map(double)\n  batch(10, 'pad')\n" in shown
    assert "3 batches an epoch, 10 examples in one" in shown
    assert "  130 bytes a batch" in shown  # 10 float32, 10 int64, 10 bools
    rows = [line.split() for line in shown.splitlines()]
    assert ["['id']", "int64,", "int32", "for", "jax", "[10]", *"0 4.5 9 0 1 2 3".split()] in rows
    assert ["['x']", "float32", "[10]", *"0 9 18 0 2 4 6".split()] in rows
    assert main(["data", str(program), "--evaluation", "test"]) == 0
    assert "2 batches an epoch, 3 examples in one" in capsys.readouterr().out


def test_command_says_what_is_wrong(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert main(["data", str(program), "broken=true"]) == 2
    assert "this program has no data to train on" in capsys.readouterr().err
    assert main(["data", str(program), "--evaluation", "tset"]) == 1
    assert "no evaluation 'tset'" in capsys.readouterr().err


def test_command_refuses_an_evaluation_that_no_data_has_and_numbers_that_read_nothing(
    tmp_path, capsys
):
    program = tmp_path / "program.py"
    program.write_text(PICTURES)
    assert main(["data", str(program), "--evaluation", "test"]) == 2
    assert "of training alone, without evaluations" in capsys.readouterr().err
    for number in ("0", "-1"):
        assert main(["data", str(program), "--batches", number]) == 2
        assert f"--batches is {number}; it must be a positive integer" in capsys.readouterr().err
    one_batch = (batch for batch in [{"x": np.ones((2, 3), np.float32)}])
    print_report(one_batch, 5)
    assert "the data has one batch" in capsys.readouterr().out


PICTURES = """
import fulgurite as fg
import numpy as np
from fulgurite_cli import Experiment
from fulgurite_data import Arrays


def experiment(has_images: bool = True) -> Experiment:
    ramp = np.arange(3 * 4 * 5).reshape(3, 4, 5) if has_images else np.zeros((3, 4))
    colors = np.full((3, 70, 80, 3), (10, 20, 30), np.uint8)
    arrays = {"ramp": ramp, "photo": colors if has_images else ramp, "label": np.arange(3)}
    data = Arrays(arrays).batch(4, remainder="pad")
    return Experiment(fg.Engine(epochs=1), model=None, data=data)
"""


def test_command_draws_the_images_of_the_first_batch(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PICTURES)
    picture = tmp_path / "batch.png"
    assert main(["data", str(program), "--picture", str(picture)]) == 0
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        pixels = np.asarray(image)
    # Two rows of two images, each enlarged 12 times, for the ramp; above, the photos as they are.
    height, left, top = 6 + 14 + 2 * (70 + 6 + 14), 6, 6 + 14
    assert pixels.shape[0] == height + 6 + 14 + 2 * (4 * 12 + 6 + 14)
    assert (pixels[top : top + 70, left : left + 80] == (10, 20, 30)).all()
    ramp = pixels[height + top :][: 4 * 12, left : left + 5 * 12]
    expected = np.rint(np.arange(20).reshape(4, 5) * 255 / 59)
    assert (ramp[6::12, 6::12] == expected[..., None]).all()
    second_row = pixels[height + top + 4 * 12 + 6 + 14 :][: 4 * 12, left : left + 5 * 12]
    assert second_row[-1, -1].tolist() == [255, 255, 255]
    # Padding is not drawn as a fourth image.
    assert (pixels[height + top + 4 * 12 + 6 + 14 :, left + 5 * 12 + 6 :] == 255).all()


def test_command_says_that_a_batch_has_no_images(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PICTURES)
    options = ["has_images=false", "--picture", str(tmp_path / "batch.png")]
    assert main(["data", str(program), *options]) == 2
    assert "has no images, which are arrays (batch, height, width)" in capsys.readouterr().err


def test_what_is_no_byte_is_scaled_from_its_lowest_to_its_highest_number():
    numbers = np.array([[[-1.0, np.nan], [0.0, 1.0]]])
    assert as_pixels(numbers)[0, ..., 0].tolist() == [[0, 0], [128, 255]]  # type: ignore[index]
    assert as_pixels(np.zeros((2, 3, 4, 5))) is not None  # 3 channels first
    half = as_pixels(np.arange(8).reshape(2, 2, 2).astype(jnp.bfloat16))
    assert half is not None and half[0, 0, 0, 0] == 0 and half[1, 1, 1, 0] == 255
    for array in (np.zeros((2, 5, 5, 5)), np.zeros((2, 3)), np.zeros((2, 3, 3), np.complex64)):
        assert as_pixels(array) is None


def test_numbers_of_every_dtype_are_shown(tmp_path):
    kinds = ["bool", "bfloat16", "complex64"]
    arrays = {kind: np.array([0, 1]).astype(jnp.dtype(kind)) for kind in kinds}
    lines = describe_data(Arrays(arrays).batch(2)).splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["['bfloat16']", "bfloat16", "[2]", "0", "0.5", "1", "0", "1"],
        ["['bool']", "bool", "[2]", "0", "0.5", "1", "0", "1"],
        ["['complex64']", "complex64", "[2]", "0", "0.5", "1", "0+0j", "1+0j"],
    ]


def test_an_endless_pipeline_has_no_number_of_batches(tmp_path):
    write_tokens(tmp_path / "text.bin", [range(10)] * 20)
    text = describe_data(Tokens(tmp_path / "text.bin").window(5).shuffle().repeat().batch(4))
    assert "endless batches an epoch, 4 examples in one" in text
    assert "20 tokens in the first batch\n" in text


def test_time_of_tokens_that_are_packed_is_that_of_their_file(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(inspection, "perf_counter", lambda: clock[0])
    write_tokens(tmp_path / "text.bin", [range(10)] * 20)
    batches = Tokens(tmp_path / "text.bin").pack(20).batch(4)
    read_pieces = TokenNode.read_pieces

    def wait(self, *arguments):
        clock[0] += 0.5
        return read_pieces(self, *arguments)

    monkeypatch.setattr(TokenNode, "read_pieces", wait)
    speeds = inspection.measure_stages(batches, 2)
    assert [speed.seconds for speed in speeds] == [1, 0, 0]


def test_time_of_a_stage_is_its_own(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(inspection, "perf_counter", lambda: clock[0])

    def wait(example):
        clock[0] += 0.25
        return example

    batches = Arrays({"x": np.zeros((64, 3))}).map(wait).shuffle().batch(8)
    speeds = inspection.measure_stages(batches, 4)
    assert [speed.stage.partition("(")[0] for speed in speeds] == [
        "Arrays",
        "map",
        "shuffle",
        "batch",
    ]
    # 32 examples, and example 0 once more for its dtypes.
    assert [speed.seconds for speed in speeds] == [0, 8.25, 0, 0]
    assert all(speed.num_examples == 32 for speed in speeds)
    assert speeds[1].examples_per_second == 32 / 8.25
    assert "read_batch" not in vars(batches.node)  # nothing of the clock is left


def test_loader_that_is_no_pipeline_is_described_too():
    data = fg.DataSource([{"x": np.ones((4, 2), np.float32)}] * 3, name="mine")
    text = describe_data(data)
    assert "mine: list" in text and "3 batches an epoch, 4 examples in one" in text
    assert "resume: exact" in text


def test_tokens_are_counted_without_padding(tmp_path):
    write_tokens(tmp_path / "text.bin", [range(100)])
    batches = Tokens(tmp_path / "text.bin").window(9).batch(4)
    assert batches.count_per_batch() == (36, "tokens")
    assert "36 tokens in the first batch, about 108 an epoch" in describe_data(batches)
    packed = {"tokens": np.ones((2, 4)), "segments": np.array([[1, 1, 2, 0], [1, 0, 0, 0]])}
    assert count_tokens(packed) == 4
    assert count_tokens(fg.Batch(packed, np.array([True, False]))) == 3
    assert count_tokens(np.ones(3)) is None
    assert count_examples(fg.Batch(packed, np.array([True, False]))) == 1
    assert count_examples(fg.Batch(packed, num_examples=7)) == 7
    write_tokens(tmp_path / "rows.bin", [[1, 2, 3], [4, 5, 6, 7, 8]])
    rows = Tokens(tmp_path / "rows.bin")
    for padded in (rows.pad(8).batch(2), rows.bucket([8], 3, remainder="pad")):
        assert count_tokens(padded.read(0)) == 8
        assert padded.count_per_batch() == (2, "examples")
    rows = Items([{"tokens": row, "segments": row} for row in np.array([[1, 1], [1, 0]])])
    assert rows.batch(2).count_per_batch() == (2, "examples")
    assert fg.ArrayData({"x": np.zeros(5)}, 3).count_per_batch() == (3, "examples")


@pytest.mark.parametrize(
    ("per_step", "shown"),
    [((512, "tokens"), "812 steps/s  415,898 tokens/s"), (None, "812 steps/s")],
)
def test_line_of_a_run_shows_what_the_data_counts(per_step, shown):
    assert Line(3, None, 812.3, per_step=per_step).text(80).plain == f"step 3  {shown}"
