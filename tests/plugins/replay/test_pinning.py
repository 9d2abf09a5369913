"""A run that resumes with another executable than it has trained with says so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_optimizers import Freeze
from fulgurite_replay import PinPrograms, read_programs
from fulgurite_replay.pinning import hash_executable, hash_source
from fulgurite_testing import TinyModel, tiny_data
from pinned import make_engine

PROGRAM = Path(__file__).parent / "pinned.py"


def resume_in_a_process(
    run: Path, steps: int, on_change: str, flags: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, str(PROGRAM), str(run), str(steps), on_change]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_resumed_run_notices_another_executable_and_no_other_difference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = resume_in_a_process(run, 4, "error")
    assert first.returncode == 0, first.stderr
    (program,) = read_programs(run)
    assert (program.name, program.attempt) == ("step", 1)
    # Another process compiles it to the same one.
    second = resume_in_a_process(run, 8, "error")
    assert second.returncode == 0, second.stderr
    assert read_programs(run) == [program]
    flags = "--xla_cpu_enable_fast_math=true"
    refused = resume_in_a_process(run, 12, "error", flags)
    assert refused.returncode == 1
    assert "step for batches" in refused.stderr
    assert "was compiled to another executable than in attempt 1: XLA has" in refused.stderr
    warned = resume_in_a_process(run, 12, "warn", flags)
    assert warned.returncode == 0, warned.stderr
    # What was refused has not become what the next attempt is compared with.
    assert "was compiled to another executable than in attempt" in warned.stdout
    programs = read_programs(run)
    assert programs[-1].source == program.source
    assert programs[-1].executable != program.executable


def alter(run: Path, **changes: str) -> None:
    """Change what is noted of the newest program, as if another machine had compiled it."""
    file = run / "programs.jsonl"
    entry = json.loads(file.read_text().splitlines()[-1]) | changes
    file.write_text(json.dumps(entry) + "\n")


@pytest.mark.full
def test_change_of_version_is_named_and_ends_the_run_before_a_step(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    make_engine(str(run), 4).fit(TinyModel, tiny_data())
    alter(run, executable="0" * 64, platform="jax 0.9, jaxlib 0.9, TPU")
    with pytest.raises(CheckpointError, match=r"was compiled by jax 0\.9, jaxlib 0\.9, TPU, and"):
        make_engine(str(run), 8).fit(TinyModel, tiny_data(), resume="auto")
    assert not (run / "checkpoints" / "step-8").exists()
    # A program that no attempt has compiled continues none.
    alter(run, executable="0" * 64, source="1" * 64)
    make_engine(str(run), 8).fit(TinyModel, tiny_data(), resume="auto")
    assert [program.attempt for program in read_programs(run)] == [1, 3]


@pytest.mark.full
def test_programs_of_one_attempt_for_the_same_batches_are_no_change(tmp_path: Path) -> None:
    def make_frozen(steps: int) -> fg.Engine:
        plugins = [
            Checkpointer(every=2),
            PinPrograms(),
            Freeze(fg.select("linear.bias"), until=5),
        ]
        run_dir = str(tmp_path / "run")
        return fg.Engine(steps=steps, run_dir=run_dir, autoload=False, plugins=plugins)

    make_frozen(4).fit(TinyModel, tiny_data())
    make_frozen(8).fit(TinyModel, tiny_data(), resume="auto")
    programs = read_programs(tmp_path / "run")
    assert [program.attempt for program in programs] == [1, 2]
    assert programs[0].batch == programs[1].batch
    make_frozen(10).fit(TinyModel, tiny_data(), resume="auto")
    assert read_programs(tmp_path / "run") == programs


def test_place_of_an_operation_in_the_code_is_no_part_of_the_hash() -> None:
    def compile_sum(scale: float) -> jax.stages.Compiled:
        return jax.jit(lambda x: (scale * x).sum()).lower(jnp.arange(5.0)).compile()

    def compile_elsewhere() -> jax.stages.Compiled:
        return jax.jit(lambda x: (2.0 * x).sum()).lower(jnp.arange(5.0)).compile()

    assert hash_executable(compile_sum(2.0)) == hash_executable(compile_elsewhere())
    assert hash_executable(compile_sum(2.0)) != hash_executable(compile_sum(3.0))


def test_names_and_copies_of_functions_are_no_part_of_the_hash_of_a_source() -> None:
    def make_inner(scale: float) -> Any:
        @jax.jit
        def inner(x: Any) -> Any:
            return jnp.sin(scale * x)

        return inner

    def lower(*functions: Any) -> jax.stages.Lowered:
        return jax.jit(lambda x: [function(x) for function in functions]).lower(jnp.arange(3.0))

    first = make_inner(2.0)
    shared = lower(first, first)
    copied = lower(first, make_inner(2.0))
    assert shared.as_text() != copied.as_text()
    assert hash_source(shared) == hash_source(copied)
    assert hash_source(lower(first, make_inner(3.0))) != hash_source(shared)
    assert hash_source(lower(first)) != hash_source(shared)
    assert hash_source(lower(make_inner(3.0), first)) != hash_source(lower(first, make_inner(3.0)))


def test_file_of_something_else_and_a_run_without_directory_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for line in ('{"name": "step"}', '{"name": 1, "batch": "", "source": ""}'):
        (run / "programs.jsonl").write_text(f"{line}\n{line}\n")
        with pytest.raises(CheckpointError, match=r"jsonl, line 1 is not a line of PinPrograms"):
            read_programs(run)
    with pytest.raises(ConfigurationError, match="no place to write to"):
        fg.Engine(steps=1, autoload=False, plugins=[PinPrograms()]).fit(TinyModel, tiny_data())
    with pytest.raises(ConfigurationError, match="on_change"):
        PinPrograms("ignore")  # type: ignore[arg-type]
