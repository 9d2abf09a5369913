"""The examples are programs that run."""

import ast
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import nbformat
import numpy as np
import pytest
from fulgurite_checkpoint.commands import checkpoints
from fulgurite_models import Llama, LlamaConfig
from fulgurite_pretrained import from_pretrained, save_pretrained
from nbclient import NotebookClient
from tokenizers import ByteLevelBPETokenizer

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, **variables: str) -> list[str]:
    """The lines that an example prints to stdout."""
    command, environment = (
        [sys.executable, str(EXAMPLES / name), *arguments],
        {**os.environ, **variables},
    )
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout.splitlines()


def kill_after_checkpoint(arguments: list[str], run_dir: Path, step: int) -> None:
    """Start an example, and kill it as soon as the checkpoint of a step is complete."""
    name, *rest = arguments
    command = [sys.executable, str(EXAMPLES / name), *rest, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (run_dir / "checkpoints" / f"step-{step}" / "COMMIT").exists():
            assert process.poll() in (None, 0)
            time.sleep(0.01)
        process.kill()


def assert_runs_are_equal(first: Path, second: Path) -> None:
    """Check that the records and the last checkpoints of two runs are equal to the bit."""
    records = [(run_dir / "records.jsonl").read_bytes() for run_dir in (first, second)]
    assert records[0] == records[1]
    assert checkpoints(["diff", str(first), str(second)]) == 0


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines()]


def test_digits():
    *progress, last = run("digits.py", "steps=500", "width=64")
    shown = [
        re.fullmatch(r"step +(\d+)  loss (\d\.\d{4})  accuracy ([01]\.\d{3})", line)
        for line in progress
    ]
    assert all(shown)
    steps, losses, accuracies = zip(*(match.groups() for match in shown if match), strict=True)
    assert steps == ("200", "400", "500")
    assert float(losses[0]) > float(losses[1]) > float(losses[2])
    assert float(accuracies[0]) < float(accuracies[1]) < float(accuracies[2])
    match = re.fullmatch(r"test accuracy ([01]\.\d{4})", last)
    assert match and float(match[1]) > 0.9


@pytest.mark.slow
def test_gan(tmp_path):
    *progress, last = run("gan.py", f"folder={tmp_path}", XLA_FLAGS="")
    assert len(progress) == 15
    metrics = ast.literal_eval(last)
    assert metrics["classes"] == 10
    assert metrics["confidence"] > 0.8
    assert metrics["relative"] < 0.1
    for step in (1000, 2000, 3000):
        assert (tmp_path / f"step-{step}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_wgan_gp():
    *progress, last = run("wgan_gp.py", XLA_FLAGS="")
    assert len(progress) == 8
    metrics = ast.literal_eval(last)
    assert metrics["modes"] == 8
    assert metrics["high_quality"] > 0.8


@pytest.mark.slow
def test_ppo():
    lines = run("ppo.py", "steps=40", XLA_FLAGS="")
    shown = [re.fullmatch(r"step +(\d+)  episodes of +([\d.]+) steps  .*", line) for line in lines]
    lengths = {int(match[1]): float(match[2]) for match in shown if match}
    assert [*lengths] == [20, 40]
    # At random the pole falls after about 22 steps.
    assert lengths[20] > 40 and lengths[40] > 120


def test_agent_of_ppo_goes_on_in_the_same_episodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    ppo = import_module("ppo")
    make_agent = eqx.nn.make_with_state(partial(ppo.Agent, 2, 1e-3))
    data = [np.zeros(1, np.float32)]
    engine = ppo.PPO(length=8, epochs=2, num_minibatches=2, steps=3)
    whole = engine.fit(make_agent, data)
    part = engine.fit(make_agent, data, steps=2)
    assert bool(np.all(part.state.model_state.get(part.module.envs).length > 0))
    resumed = engine.fit(data=data, state=part.state, steps=1)
    ends = [
        eqx.filter((end.module, end.state.model_state), eqx.is_array) for end in (whole, resumed)
    ]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *ends)))


def test_advantages_of_ppo_are_discounted_sums_of_errors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    rng = np.random.default_rng(0)
    value, last = rng.normal(size=(6, 2)), rng.normal(size=2)
    has_ended = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [0, 1]], bool)
    advantages = import_module("ppo").estimate_advantages(value, has_ended, last)
    values = np.concatenate([value, last[None]])
    errors = 1 + 0.99 * values[1:] * ~has_ended - values[:-1]
    for env, ends in enumerate(([2, 5], [5])):
        for start in range(6):
            stop = min(end for end in ends if end >= start) + 1
            weights = (0.99 * 0.95) ** np.arange(stop - start)
            expected = weights @ errors[start:stop, env]
            np.testing.assert_allclose(advantages[start, env], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_digits_resumes_after_a_kill(tmp_path: Path):
    arguments = ["digits.py", "steps=600", "width=32", "--run"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*arguments, str(whole))
    kill_after_checkpoint(arguments, killed, step=200)
    *_, last = run(*arguments, str(killed))
    assert last.startswith("test accuracy ")
    assert_runs_are_equal(whole, killed)
    assert (killed / "records.csv").read_bytes() == (whole / "records.csv").read_bytes()
    assert [row["step"] for row in read_records(killed)] == [200, 400, 600]


@pytest.mark.slow
def test_classifier_is_evaluated_from_its_run_alone(tmp_path: Path):
    """The whole program is a configuration, overridden by a wildcard."""
    text = (EXAMPLES / "classifier.py").read_text()
    assert len(text[text.index('"""') :].splitlines()) <= 90
    run("classifier.py", "steps=40", "every=20", "**.half_life=10", "--run", str(tmp_path))
    evaluate = [sys.executable, "-m", "fulgurite_cli", "evaluate", "--json", "--run", str(tmp_path)]
    process = subprocess.run(evaluate, cwd=EXAMPLES, check=True, capture_output=True, text=True)
    result = json.loads(process.stdout)
    assert (result["evaluator"], result["step"]) == ("test", 40)
    assert result["metrics"]["accuracy"] > 0.5
    values = [
        row["values"]
        for row in read_records(tmp_path)
        if (row["source"], row["step"]) == ("test", 40)
    ]
    assert values == [result["metrics"]]


@pytest.mark.slow
def test_classifier_resumes_after_a_kill_with_the_same_bits(tmp_path: Path):
    arguments = ["classifier.py", "steps=80", "every=20", "**.half_life=10", "--run"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*arguments, str(whole))
    kill_after_checkpoint(arguments, killed, step=40)
    run(*arguments, str(killed))
    assert_runs_are_equal(whole, killed)


LANGUAGE_MODEL = [
    "language_model.py",
    *("width=32", "depth=1", "length=32", "vocabulary=500", "rate=3e-3", "steps=60", "every=20"),
]


@pytest.mark.slow  # tests/recovery/test_killed_language_model.py runs it in the longer tests
def test_language_model_learns_and_shows_samples(tmp_path: Path):
    text = (EXAMPLES / "language_model.py").read_text()
    assert len(text[text.index('"""') :].splitlines()) <= 150
    shown = run(*LANGUAGE_MODEL, f"cache={tmp_path / 'cache'}", "--run", str(tmp_path / "run"))
    records = read_records(tmp_path / "run")
    losses = [row["values"] for row in records if row["source"] == "validation"]
    assert [metrics["perplexity"] for metrics in losses] == pytest.approx(
        [np.exp(metrics["loss"]) for metrics in losses], rel=1e-5
    )
    # That of guessing one of 500 tokens is 500.
    assert losses[-1]["perplexity"] < min(400, losses[0]["perplexity"])
    samples = [line for line in shown if line.startswith(("step 20: ", "step 40: ", "step 60: "))]
    assert len(samples) == 3


@pytest.mark.slow  # tests/recovery/test_killed_language_model.py kills it in the longer tests
def test_language_model_resumes_after_a_kill_with_the_same_bits(tmp_path: Path):
    arguments = [*LANGUAGE_MODEL, f"cache={tmp_path / 'cache'}", "--run"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*arguments, str(whole))
    kill_after_checkpoint(arguments, killed, step=40)
    run(*arguments, str(killed))
    assert_runs_are_equal(whole, killed)


@pytest.mark.slow
def test_autoencoder(tmp_path: Path):
    """It reconstructs by keys, and what its encoder computes is in the records."""
    arguments = ["autoencoder.py", "steps=100", "every=50", "--run"]
    *_, last = run(*arguments, str(tmp_path / "whole"))
    match = re.fullmatch(r"reconstruction (0\.\d+)  absolute (0\.\d+)", last)
    assert match and float(match[1]) < 0.03
    records = (tmp_path / "whole" / "records.jsonl").read_text()
    assert '"metrics/latent_norm"' in records and '"metrics/update_norm"' in records


@pytest.mark.slow
def test_autoencoder_resumes_after_a_kill_with_the_same_bits(tmp_path: Path):
    arguments = ["autoencoder.py", "steps=300", "every=20", "--run"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    *_, last = run(*arguments, str(whole))
    kill_after_checkpoint(arguments, killed, step=40)
    assert run(*arguments, str(killed))[-1] == last
    assert_runs_are_equal(whole, killed)


@pytest.mark.slow  # tests/plugins/sharding/on_eight_devices trains its model in the longer tests
@pytest.mark.parametrize(
    ("layout", "share"),
    [("fsdp", 1 / 8), ("data", 1), ("tensor", 1 / 4), ("both", 1 / 8)],
)
def test_transformer(layout: str, share: float):
    lines = run(
        "transformer.py",
        f"layout={layout}",
        "devices=8",
        "width=64",
        "context=32",
        "blocks=1",
        "steps=60",
    )
    text = "\n".join(lines)
    devices = re.search(
        r"^8 devices, each with ([\d,]+) bytes of parameters and ([\d,]+) of Adam's$",
        text,
        re.MULTILINE,
    )
    assert devices
    parameters, optimizer = (int(number.replace(",", "")) for number in devices.groups())
    # An embedding and a head of 256 by 64, and four times 64 by 64 and twice 64 by 256 in the
    # block.
    whole = 4 * (2 * 256 * 64 + 4 * 64 * 64 + 2 * 64 * 256)
    assert (
        share <= parameters / whole < (share + 0.03 if layout in ("data", "fsdp") else 2.5 * share)
    )
    assert 2 * parameters <= optimizer <= 2 * parameters + 8
    bits = [float(number) for number in re.findall(r"bits per byte ([\d.]+)$", text, re.MULTILINE)]
    assert len(bits) == 3 and bits[0] > bits[1] and bits[-1] < 4.5
    assert re.search(r"tokens per second [\d,]+$", text, re.MULTILINE)


@pytest.mark.slow
def test_digits_standalone_eval(tmp_path: Path):
    folder = tmp_path / "run"
    *lines, drawn = run("digits_standalone_eval.py", "steps=500", "width=64", "--run", str(folder))
    shown = [
        match
        for line in lines
        if (match := re.fullmatch(r"(\w+)  step 500  accuracy ([.\d]+)  loss .*", line))
    ]
    assert [match[1] for match in shown] == ["test", "shifted"] and float(shown[0][2]) > 0.9
    assert drawn == str(folder / "accuracy.png") and Path(drawn).read_bytes()[1:4] == b"PNG"


def build_notebook(script: Path) -> Any:
    """Return the notebook of a script whose cells begin with `# %%`."""
    cells = []
    for part in re.split(r"^# %%", script.read_text(), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
            cells.append(nbformat.v4.new_markdown_cell(text.strip()))
        else:
            cells.append(nbformat.v4.new_code_cell(body.strip()))
    return nbformat.v4.new_notebook(cells=cells)


def read_text(output: Any) -> str:
    """Return what an output of a cell shows, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", output["data"]["text/plain"])


def test_notebook(monkeypatch: pytest.MonkeyPatch):
    """In a real kernel there is one line for a run, brought up to date in place; tables,
    curves and errors are shown as a notebook shows them."""
    monkeypatch.delenv("FULGURITE_AUTOLOAD", raising=False)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = build_notebook(EXAMPLES / "notebook.py")
    notebook.cells.append(nbformat.v4.new_code_cell("engine.fit(Classifier, [1])"))
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(output.output_type == "stream" for cell in outputs for output in cell)
    fit, curves, _, times, _, error = outputs[-6:]
    lines = [read_text(output) for output in fit if read_text(output).startswith("step ")]
    (line,) = [line for line in lines if "/" in line.split()[1]]
    evaluations = [line for line in lines if "/" not in line.split()[1]]
    assert all("accuracy" in evaluation for evaluation in evaluations), lines
    assert line.startswith("step 400/400") and line.endswith("done\n")
    assert all("text/html" in output["data"] for output in [*fit, *times])
    # What was shown while the fit started has made way.
    starting, *others = [read_text(output) for output in fit]
    assert starting == ""
    first, *between, last = [text.split()[0] for text in others]
    assert (first, last) == ("module", "time")
    # The line appears after a while, before or after the first program is compiled.
    assert sorted(between) == ["compiled", "compiled", *["step"] * len(lines)]
    assert "image/png" in curves[0]["data"]
    assert [read_text(output) for output in error[:-1]] == [""]
    assert error[-1].output_type == "error" and len(error[-1].traceback) < 10


def test_finetune_writes_a_folder_of_the_same_kind(tmp_path: Path):
    """From a small model in the form that transformers writes, with a tokenizer of its own."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([os.__file__], vocab_size=300, show_progress=False)
    config = LlamaConfig(300, 32, 2, 4, 2, 64)
    theirs, tuned = tmp_path / "theirs", tmp_path / "tuned"
    model = Llama(config, key=jax.random.key(0))
    save_pretrained(model, theirs)
    tokenizer.save(str(theirs / "tokenizer.json"))
    arguments = [str(theirs), str(tuned), "--steps", "40", "--length", "32", "--rate", "3e-2"]
    lines = run("finetune.py", *arguments)
    before, *steps, after = (float(line.split()[-1]) for line in lines if "test loss" in line)
    assert after < before - 0.05
    assert steps[-1] == pytest.approx(after, abs=2e-4)  # the adapters apart, and merged
    assert [line.split(" -> ")[0] for line in lines if line.startswith("sample")] == [
        "sample  'def __init__(self'",
        "sample  '    return '",
    ]
    assert (tuned / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), from_pretrained(tuned), model)
    assert changed.blocks.attention.query.weight and not changed.blocks.mlp.up.weight


def test_every_example_is_run_here():
    names = {"autoencoder.py", "classifier.py", "digits.py", "digits_standalone_eval.py", "gan.py"}
    names |= {"finetune.py", "language_model.py", "notebook.py", "ppo.py", "transformer.py"}
    names |= {"serve.py"}  # by tests/plugins/export/test_serve.py
    names |= {"wgan_gp.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == names


# Distributions whose name is not that of the module that they hold.
DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the inline metadata of a script (PEP 723)."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", path.read_text())
    assert block, f"{path.name} does not begin with `# /// script`"
    return tomllib.loads("".join(line[2:] for line in block[1].splitlines(keepends=True)))


def find_used_distributions(path: Path) -> set[str]:
    """Return what a program imports, and the plugins that it names, with the examples that it
    imports."""
    modules: set[str] = set()
    words: set[Any] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Constant):
            words.add(node.value)
    plugins = entry_points(group="fulgurite.plugins")
    used = {plugin.dist.name for plugin in plugins if plugin.dist and plugin.name in words}
    for module in modules - sys.stdlib_module_names:
        other = EXAMPLES / f"{module}.py"
        if other.exists():
            used |= find_used_distributions(other)
        else:
            used.add(DISTRIBUTIONS.get(module, module.replace("_", "-")))
    return used


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_metadata_of_an_example_lists_what_it_uses(path: Path):
    """`uv run examples/gan.py` installs what the program needs, from this clone."""
    metadata = read_metadata(path)
    assert metadata["dependencies"] == sorted(metadata["dependencies"])
    assert set(metadata["dependencies"]) >= find_used_distributions(path)
    sources = metadata["tool"]["uv"]["sources"]
    assert set(sources) == {
        name for name in metadata["dependencies"] if name.startswith("fulgurite")
    }
    for name, source in sources.items():
        project = (path.parent / source["path"] / "pyproject.toml").read_text()
        assert tomllib.loads(project)["project"]["name"] == name
        assert source["editable"], "otherwise uv refuses it beside the workspace's own"


def test_an_example_misses_a_package_at_its_start(tmp_path: Path):
    """Not where it draws its first picture, and in one sentence."""
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    )
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / "gan.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.returncode == 1 and not process.stdout
    assert process.stderr.splitlines() == [
        "matplotlib is not installed. Start this example with `uv run examples/gan.py`, "
        "which installs what is listed at its top."
    ]
