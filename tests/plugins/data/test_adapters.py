"""Loaders of other libraries, each run for real. Where a library is not installed, its tests say so:
CONTRIBUTING.md shows how to get them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import loader_program as program
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator
from fulgurite_checkpoint import Checkpointer
from fulgurite_data import HuggingFace, from_grain, from_huggingface, from_tfdata, from_torch

PROGRAM = Path(__file__).with_name("loader_program.py")
TOTAL = 14
"""Batches, of which a pass has six."""
LIBRARIES = {
    "torch": "torch",
    "stateful": "torchdata",
    "grain": "grain",
    "grainloader": "grain",
    "huggingface": "datasets",
    "tfdata": "tensorflow",
}

pytestmark = [
    pytest.mark.full,
    # Of torchdata, about a function of torch; of TensorFlow's protocol buffers.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def require(library) -> Any:
    return pytest.importorskip(library, reason=f"{library} is not installed: nothing was run")


def run_program(kind, total, position=""):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(total)],
        input=position,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_loader_continues_from_every_position_with_the_next_batch(kind):
    require(LIBRARIES[kind])
    source = program.make_source(kind)
    assert source.resume == "exact"
    values, positions = program.read(source, TOTAL)
    for number in (1, 5, 6, 7, 12):
        position = program.from_json(positions[number - 1])
        rest, _ = program.read(program.make_source(kind), TOTAL - number, position)
        assert rest == values[number:], number
    for first in (0, 6):
        epoch = values[first : first + 6]
        assert sorted(row for rows, _ in epoch for row in rows) == list(range(program.SIZE))
        assert [is_last for _, is_last in epoch] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "kind",
    [
        "torch-2",
        "stateful-2",
        pytest.param("grain-2", marks=pytest.mark.slow),
        pytest.param("grainloader-2", marks=pytest.mark.slow),
    ],
)
def test_loader_with_spawned_workers_continues_in_another_process(kind):
    require(LIBRARIES[kind.removesuffix("-2")])
    whole = run_program(kind, TOTAL)
    rest = run_program(kind, TOTAL - 8, whole["positions"][7])
    assert rest["values"] == whole["values"][8:]
    for epoch in (whole["values"][:6], whole["values"][6:12]):
        assert sorted(row for rows, _ in epoch for row in rows) == list(range(program.SIZE))


def read_values(source, total):
    return [rows for rows, _ in program.read(source, total)[0]]


def test_order_of_grain_is_that_of_its_repeat():
    require("grain")
    dataset = program.make_grain(0)
    repeated: Any = dataset.repeat()
    expected = [repeated[number]["x"].tolist() for number in range(TOTAL)]
    assert read_values(from_grain(dataset), TOTAL) == expected
    assert expected[:6] != expected[6:12]


def test_order_of_streamed_rows_is_that_of_their_epochs():
    require("datasets")
    dataset = program.make_iterable()
    expected = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        rows = [row["x"] for row in dataset]
        expected += [rows[low : low + 4] for low in range(0, program.SIZE, 4)]
    assert read_values(from_huggingface(dataset, 4), 12) == expected
    assert expected[:6] != expected[6:]


def test_order_of_tensorflow_is_its_own():
    require("tensorflow")
    expected = [batch["x"].tolist() for batch in program.make_tfdata().as_numpy_iterator()]
    assert read_values(program.make_source("tfdata"), 12) == 2 * expected


def test_torch_tensors_of_every_dtype_keep_it():
    torch = require("torch")
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
    tensors = {name: torch.arange(4).to(getattr(torch, name)) for name in names}
    rows = [{name: tensor[row] for name, tensor in tensors.items()} for row in range(4)]
    (batch,) = from_torch(torch.utils.data.DataLoader(rows, 4)).source
    for name in names:
        assert batch[name].dtype == jnp.dtype(name)
        assert batch[name].astype(np.float64).tolist() == (
            [0, 1, 1, 1] if name == "bool" else [0, 1, 2, 3]
        )
    with BatchIterator(from_torch(torch.utils.data.DataLoader(rows, 4)), seed=0, epochs=1) as items:
        device_batch = jax.device_put(next(items).batch)
    assert device_batch["int64"].dtype == jnp.int32


class Line(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key):
        self.layer = eqx.nn.Linear(2, 1, key=key)

    def training_step(self, batch, ctx):
        preds = jax.vmap(self.layer)(batch["y"])
        return fg.Output(jnp.mean((preds - batch["x"][:, None]) ** 2))

    def configure_optimizers(self):
        return optax.sgd(1e-4)


def test_plain_torch_loader_trains_and_is_refused_where_a_run_would_resume(tmp_path):
    require("torch")
    data = from_torch(program.make_torch(0))
    assert fg.Engine(epochs=2).fit(Line, data).state.step == 12
    engine = fg.Engine(epochs=2, plugins=[Checkpointer(every=3)], run_dir=tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"resume='restart' \(not exact\)"):
        engine.fit(Line, data)
    with pytest.raises(ConfigurationError, match=r"from_torch\(loader, resume='replay'\)"):
        engine.fit(Line, data)


def test_shuffled_torch_loader_resumes_with_the_weights_of_an_undisturbed_run(tmp_path):
    require("torch")

    def fit(steps, name):
        engine = fg.Engine(steps=steps, plugins=[Checkpointer(every=4)], run_dir=tmp_path / name)
        return engine.fit(Line, from_torch(program.make_torch(0), resume="replay"), resume="auto")

    fit(8, "broken")
    resumed = fit(11, "broken").state.module.layer.weight
    whole = fit(11, "whole").state.module.layer.weight
    assert np.array_equal(resumed, whole)


def test_loader_that_draws_random_examples_is_told_before_it_trains():
    torch = require("torch")

    def read(position=None):
        noise = np.random.default_rng()
        rows = [{"x": noise.normal()} for _ in range(8)]
        data = from_torch(torch.utils.data.DataLoader(rows, 2), resume="replay")
        with BatchIterator(data, seed=0, position=position) as items:
            return [next(items).position for _ in range(3)][-1]

    position = read()
    with pytest.raises(DataError, match="first 3 batches of pass 0 are not those that the run had"):
        read(position)


def test_torch_loader_whose_order_nobody_can_repeat_is_refused():
    torch = require("torch")
    rows = [{"x": float(number)} for number in range(8)]
    loader = torch.utils.data.DataLoader(rows, 2, shuffle=True)
    with pytest.raises(ConfigurationError, match=r"generator=torch.Generator\(\)"):
        from_torch(loader, resume="replay")
    assert from_torch(loader, resume="restart").resume == "restart"


def test_forked_workers_are_refused():
    torch = require("torch")
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ConfigurationError, match="multiprocessing_context='spawn'"):
        from_torch(loader)


def test_stateful_loader_refuses_the_state_of_another_number_of_workers():
    require("torchdata")
    state = {"pass": 0, "seeds": [3], "num_workers": 2, "loader": None}
    with pytest.raises(DataError, match="has 0 workers, and that of the run had 2"):
        program.make_source("stateful").source.set_state(state)


def test_stateful_loader_without_a_generator_keeps_its_order():
    stateful = require("torchdata.stateful_dataloader")

    def make():
        return from_torch(stateful.StatefulDataLoader(program.Numbers(), 4, shuffle=True))

    values, positions = program.read(make(), TOTAL)
    rest, _ = program.read(make(), TOTAL - 4, program.from_json(positions[3]))
    assert rest == values[4:]


def test_columns_of_unequal_length_say_pad_or_pack():
    datasets = require("datasets")
    columns = {"tokens": [[1], [1, 2], [3]], "label": [0, 1, 2]}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset()
    with pytest.raises(DataError, match="'tokens' has examples of 1 to 2 values.*Pad.*pack"):
        next(iter(from_huggingface(stream, 3).source))
    (batch,) = from_huggingface(stream, 3, columns=["label"]).source
    assert batch["label"].tolist() == [0, 1, 2]


def test_rows_with_an_index_are_shuffled_batched_and_packed(tmp_path):
    datasets = require("datasets")
    columns = {
        "tokens": [list(range(10 * row, 10 * row + 1 + row % 3)) for row in range(20)],
        "pair": [[row, -row] for row in range(20)],
        "label": list(range(20)),
    }
    table = datasets.Dataset.from_dict(columns)
    dataset = HuggingFace(table)
    rows = [dataset.get(row) for row in (7, 0, 19)]
    for row, number in zip(rows, (7, 0, 19), strict=True):
        assert {name: value.tolist() for name, value in row.items()} == {
            name: values[number] for name, values in columns.items()
        }
    labels = [
        batch["label"].tolist()
        for batch in HuggingFace(table, columns=["label", "pair"]).shuffle(seed=1).batch(8)
    ]
    order = [label for batch in labels for label in batch]
    assert sorted(order) == list(range(20)) != order
    packed = HuggingFace(table, columns=["tokens"]).pack(8, how="split").batch(8).read(0)
    flat = [token for document in columns["tokens"] for token in document]
    assert packed["tokens"].reshape(-1)[: len(flat)].tolist() == flat
    with pytest.raises(DataError, match="pad.*pack"):
        HuggingFace(table).batch(4).read(0)
    stages = HuggingFace(table).node.stages
    assert stages == HuggingFace(datasets.Dataset.from_dict(columns)).node.stages
    assert stages != HuggingFace(table.select(range(19))).node.stages


def test_images_are_decoded_in_their_dtype():
    datasets = require("datasets")
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    kinds = {"label": datasets.Value("int8"), "score": datasets.Value("float64")}
    features = datasets.Features({"image": datasets.Image(), **kinds})
    columns = {
        "image": [Image.fromarray(image) for image in pixels],
        "label": list(range(5)),
        "score": [0.1 * n for n in range(5)],
    }
    table = datasets.Dataset.from_dict(columns, features)
    rows = HuggingFace(table).read(range(5))
    assert rows["image"].dtype == np.uint8 and (rows["image"] == pixels).all()
    assert rows["label"].dtype == np.int8 and rows["label"].tolist() == columns["label"]
    assert rows["score"].dtype == np.float64 and rows["score"].tolist() == columns["score"]


def test_rows_may_be_written_to_by_functions_and_are_not_those_of_the_library():
    datasets = require("datasets")
    table = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]], "y": [5, 6]})

    def clear(rows):
        rows["x"][..., 0] = 0
        return rows

    by_example = HuggingFace(table).map(clear).batch(2).read(0)
    by_batch = HuggingFace(table).batch(2).map(clear).read(0)
    assert by_example["x"].tolist() == by_batch["x"].tolist() == [[0, 2], [0, 4]]
    assert table["x"][:] == [[1, 2], [3, 4]]


def test_dataset_with_a_transform_is_refused_because_nobody_would_call_it():
    datasets = require("datasets")
    table = datasets.Dataset.from_dict({"x": [1, 2]})
    changed = table.with_transform(lambda rows: {"x": [10 * x for x in rows["x"]]})
    for columns in (None, ["x"]):
        with pytest.raises(ConfigurationError, match=r"has a transform.*\.map\(function\)"):
            HuggingFace(changed, columns=columns)
    assert HuggingFace(changed.with_format(None)).read([0, 1])["x"].tolist() == [1, 2]


def test_wrong_kinds_of_dataset_say_what_to_do():
    datasets = require("datasets")
    table = datasets.Dataset.from_dict({"x": [1, 2]})
    with pytest.raises(ConfigurationError, match=r"HuggingFace\(dataset\).shuffle\(\)"):
        from_huggingface(table, 1)
    with pytest.raises(ConfigurationError, match=r"from_huggingface\(dataset, batch_size\)"):
        HuggingFace(table.to_iterable_dataset())
    with pytest.raises(ConfigurationError, match=r"choose one, dataset\['train'\]"):
        HuggingFace(datasets.DatasetDict({"train": table}))
    with pytest.raises(ConfigurationError, match="and this is a list"):
        HuggingFace([1, 2])


def test_columns_keep_small_and_large_dtypes():
    datasets = require("datasets")
    kinds = {"int8": [-1, 2], "uint16": [1, 65535], "float64": [0.1, 1e300], "bool": [True, False]}
    features = datasets.Features({name: datasets.Value(name) for name in kinds})
    stream = datasets.Dataset.from_dict(kinds, features).to_iterable_dataset()
    (batch,) = from_huggingface(stream, 2).source
    for name, values in kinds.items():
        assert batch[name].dtype == np.dtype(name)
        assert batch[name].tolist() == values


def test_strings_and_missing_values_are_refused_with_their_column():
    datasets = require("datasets")
    for values, message in (
        (["a", "b"], r"\['c'\].*encode it first"),
        ([1, None], "'c' has 1 missing"),
    ):
        stream = datasets.Dataset.from_dict({"c": values}).to_iterable_dataset()
        with BatchIterator(from_huggingface(stream, 2), seed=0) as batches:
            with pytest.raises(DataError, match=message):
                next(batches)


def test_text_is_encoded_by_a_map():
    datasets = require("datasets")
    table = datasets.Dataset.from_dict({"text": ["abc", "z", "zz"]})

    def encode(row):
        return {"tokens": np.frombuffer(str(row["text"]).encode(), np.uint8)}

    batch = HuggingFace(table).map(encode).pad(3).batch(3).read(0)
    assert batch["tokens"].tolist() == [[97, 98, 99], [122, 0, 0], [122, 122, 0]]


def test_stream_shuffled_without_a_seed_is_refused_before_training():
    datasets = require("datasets")
    stream = datasets.Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    with pytest.raises(ConfigurationError, match=r"shuffle\(seed=\.\.\.\)"):
        from_huggingface(stream.shuffle(), 1)
    assert from_huggingface(stream.shuffle(), 1, resume="restart").resume == "restart"


def test_tensorflow_shuffle_that_differs_from_pass_to_pass_is_refused():
    tf = require("tensorflow")
    dataset = tf.data.Dataset.range(8).shuffle(8, seed=0).batch(2)
    with pytest.raises(ConfigurationError, match="reshuffle_each_iteration=False"):
        from_tfdata(dataset, resume="replay")
    assert from_tfdata(dataset).resume is None


def test_ragged_tensors_say_pad_or_bucket():
    tf = require("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2)
    with pytest.raises(DataError, match=r"shapes \(1,\), \(2,\).*Pad.*bucket"):
        next(iter(from_tfdata(dataset).source))


def test_page_about_loaders_runs(tmp_path, monkeypatch):
    """Those of its blocks, too, that need libraries which the other pages do not have."""
    for library in ("torch", "torchdata", "tensorflow", "datasets"):
        require(library)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs" / "loaders.md").read_text()
    namespace = {"__name__": "__main__"}
    for block in re.finditer(r"^```py(?:thon)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, "loaders.md", "exec"), namespace)


def test_length_is_known_where_the_library_knows_it():
    require("grain")
    import grain

    numbers = grain.MapDataset.source(range(10))
    with BatchIterator(from_grain(numbers.batch(4)), seed=0) as batches:
        assert batches.epoch_length == 3
    even = numbers.filter(lambda number: number % 2 == 0)
    with BatchIterator(from_grain(even), seed=0) as batches:
        assert batches.epoch_length is None
    assert [int(number) for number in from_grain(even).source] == [0, 2, 4, 6, 8]
