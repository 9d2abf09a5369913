"""The compilation cache of programs that the command line starts."""

import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import choose_compilation_cache
from fulgurite_cli.command import main
from fulgurite_cli.compilation_cache import use_compilation_cache
from jax.experimental.compilation_cache import compilation_cache

PROGRAM = """
import hashlib
import equinox as eqx
import jax
import numpy as np
import optax
import fulgurite as fg
from fulgurite_cli import Experiment, run
from fulgurite_runs import RunPlugin

class Writer(RunPlugin):
    @fg.hookimpl
    def on_fit_end(self, run):
        print("done at", run.step)

class Net(fg.Module):
    layer: eqx.nn.Linear

    def __init__(self, *, key):
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch, ctx):
        loss = fg.metrics.Mean.from_values(jax.vmap(self.layer)(batch)[:, 0])
        features = jax.vmap(fg.metrics.Mean.from_values, in_axes=1)(batch)
        return fg.Output(loss, metrics={name: features for name in "abcdef"})

    def configure_optimizers(self):
        return optax.adam(0.1)

def experiment(cache: str | None = None, label: str = ""):
    data = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    engine = fg.Engine(steps=5, log_every=2, compilation_cache_dir=cache, plugins=[Writer()])
    return Experiment(engine, Net, fg.ArrayData(data, batch_size=4))

if __name__ == "__main__":
    result = run(experiment)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.module)]
    print(hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest())
    print(jax.config.jax_compilation_cache_dir)
"""


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """JAX without a cache, as users have it; yields the directory of ours."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "fulgurite" / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def train(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, with the cache below a folder."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")
    }
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**inherited, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def list_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.full
def test_second_start_compiles_nothing_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "fulgurite" / "compiled"
    without = train(tmp_path, FULGURITE_COMPILATION_CACHE="off")
    assert not directory.exists()
    cold = train(tmp_path, PYTHONHASHSEED="1")
    entries = list_names(directory)
    # The names of metrics are in sets somewhere, whose order is that of the seed.
    warm = train(tmp_path, PYTHONHASHSEED="2")
    assert {name.partition("-")[0] for name in entries} >= {"jit__run", "jit__uniform"}
    assert list_names(directory) == entries
    assert without.stdout == cold.stdout == warm.stdout
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert cold.stdout.splitlines()[-1] == "None"


@pytest.mark.slow
def test_damaged_and_foreign_entries_are_told_once_and_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "fulgurite" / "compiled"
    whole = train(tmp_path)
    entries = list_names(directory)
    for number, path in enumerate(sorted(directory.iterdir())):
        foreign = zlib.compress(b"\0\0\0\1 of something else")
        path.write_bytes([path.read_bytes()[:100], b"", foreign][number % 3])
    damaged = train(tmp_path)
    assert damaged.stdout == whole.stdout
    lines = damaged.stderr.splitlines()
    assert len([line for line in lines if line.startswith("warning: reading jit_")]) == 1, lines
    assert "persistent compilation cache" not in damaged.stderr
    assert list_names(directory) == entries
    again = train(tmp_path)
    assert "warning" not in again.stderr
    assert again.stdout == whole.stdout


@pytest.mark.slow
def test_cache_of_an_engine_or_of_jax_holds(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "fulgurite" / "compiled"
    mine = tmp_path / "mine"
    done = train(tmp_path, f"cache={mine}")
    assert "jit__run" in {name.partition("-")[0] for name in list_names(mine)}
    assert not [name for name in list_names(directory) if name.startswith("jit__run")]
    assert done.stdout.splitlines()[-1] == str(mine)

    other = tmp_path / "other"
    other.mkdir()
    train(tmp_path / "other", JAX_COMPILATION_CACHE_DIR=str(other / "of-jax"))
    assert (other / "of-jax").is_dir()
    assert not (other / "cache").exists()


@pytest.mark.slow
def test_runs_of_a_sweep_share_the_cache_and_the_option_that_turns_it_off(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "fulgurite" / "compiled"
    sweep = ["--sweep", "label=a,b", "--run"]
    train(tmp_path, *sweep, str(tmp_path / "first"), "--no-compilation-cache")
    assert not directory.exists()
    train(tmp_path, *sweep, str(tmp_path / "second"))
    assert len([name for name in list_names(directory) if name.startswith("jit__run")]) == 1


def test_cache_is_chosen_by_settings_and_by_the_state_of_its_directory(
    unconfigured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose_compilation_cache()
    assert (chosen.directory, chosen.is_default, chosen.problem) == (unconfigured, True, None)
    assert str(unconfigured) in chosen.description
    assert not unconfigured.exists()
    assert choose_compilation_cache(is_wanted=False).description == "none (--no-compilation-cache)"

    with monkeypatch.context() as patch:
        patch.setenv("FULGURITE_COMPILATION_CACHE", "off")
        assert choose_compilation_cache().directory is None
        patch.setenv("FULGURITE_COMPILATION_CACHE", "of")
        problem = choose_compilation_cache().problem
        assert problem == "FULGURITE_COMPILATION_CACHE is 'of', and it is on or off"
    with monkeypatch.context() as patch:
        patch.setenv("FULGURITE_DISTRIBUTED", "1")
        assert "several processes" in choose_compilation_cache().description
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "relative")
        patch.setenv("HOME", str(unconfigured.parent))
        assert choose_compilation_cache().directory == (
            unconfigured.parent / ".cache" / "fulgurite" / "compiled"
        )
        # As for a user whom the system does not know: `~` stays as it is.
        patch.setenv("HOME", "~")
        chosen = choose_compilation_cache()
        assert (chosen.directory, chosen.problem) == (None, None)
        assert chosen.description == "none, because there is no home directory"
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert choose_compilation_cache().directory is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "/of/the/user")
    chosen = choose_compilation_cache()
    assert (chosen.directory, chosen.is_default) == (Path("/of/the/user"), False)
    assert chosen.description == "/of/the/user"


def test_directory_that_others_own_or_write_into_is_not_used(
    unconfigured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unconfigured.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert choose_compilation_cache().problem == f"{unconfigured} belongs to another user"
    unconfigured.chmod(0o770)
    with use_compilation_cache():
        assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]
    assert capsys.readouterr().err == (
        "warning: programs are compiled without a cache: other users may write into "
        f"{unconfigured}: remove it\n"
    )
    unconfigured.rmdir()
    unconfigured.touch()
    assert choose_compilation_cache().problem == f"{unconfigured} is not a directory"


def test_files_that_are_old_or_of_others_are_removed(
    unconfigured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(sizes: list[int]) -> None:
        """Make files of these sizes; the first was used last."""
        for number, size in enumerate(sizes):
            path = unconfigured / f"{number}-cache"
            path.write_bytes(b"x" * size)
            os.utime(path, (1000 - number, 1000 - number))

    module = "fulgurite_cli.compilation_cache"
    monkeypatch.setattr(f"{module}.MAX_FILES", 3)
    monkeypatch.setattr(f"{module}.MAX_BYTES", 100)
    (unconfigured / "of_a_gpu").mkdir(parents=True)
    unconfigured.chmod(0o755)
    fill([1, 1, 1, 1, 1])
    with use_compilation_cache():
        assert list_names(unconfigured) == {"0-cache", "1-cache", "2-cache", "of_a_gpu"}
    assert stat.S_IMODE(unconfigured.stat().st_mode) == 0o700
    fill([60, 60, 1])
    with use_compilation_cache():
        assert list_names(unconfigured) == {"0-cache", "of_a_gpu"}
    assert capsys.readouterr().err == ""

    victim = unconfigured.parent / "victim"
    victim.touch()
    (unconfigured / "link-cache").symlink_to(victim)
    with use_compilation_cache():
        assert list_names(unconfigured) == {"0-cache", "of_a_gpu"}
    assert victim.exists()
    assert capsys.readouterr().err == (
        f"warning: files in {unconfigured} that you did not write are removed: 1\n"
    )


def test_jax_is_as_before_after_an_error(unconfigured: Path) -> None:
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = [getattr(jax.config, name) for name in names]
    with pytest.raises(ConfigurationError), use_compilation_cache():
        assert getattr(jax.config, names[0]) == str(unconfigured)
        raise ConfigurationError("of the program")
    assert [getattr(jax.config, name) for name in names] == before


def test_read_only_home_leaves_out_the_cache(
    unconfigured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # root may write everywhere but below a file.
    unconfigured.parent.touch()
    with use_compilation_cache():
        assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]
    assert "Traceback" not in capsys.readouterr().err


def test_explain_names_the_cache(
    unconfigured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "named_cache.py"
    program.write_text(PROGRAM)
    assert main(["explain", str(program)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"compilation cache: {unconfigured} for programs that the command line starts; "
        "FULGURITE_COMPILATION_CACHE=off: none"
    )
