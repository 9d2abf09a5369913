"""The models compute what plain NumPy and transformers compute of the same folders."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, ModelError
from fulgurite_models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    Rope,
    ViT,
    ViTConfig,
    generate,
)
from fulgurite_pretrained import from_pretrained, load_config, save_pretrained
from model_references import (
    CONFIGS,
    GPT2_CONFIG,
    LLAMA_CONFIG,
    QWEN3_CONFIG,
    RUN,
    VARIANTS,
    make_inputs,
    write_folder,
)
from safetensors.numpy import load_file, save_file

PYTHON = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
"""A Python in which torch and transformers can be imported."""
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
NEW = 8
GENERATING = ("gpt2", "llama", "qwen2")


def compute_logits(model: Any, inputs: Any) -> np.ndarray:
    return np.asarray(jax.vmap(eqx.nn.inference_mode(model))(inputs))


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for path in files for name, array in load_file(path).items()}


@pytest.mark.variants("full")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_folder_are_those_of_plain_numpy(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    arrays = write_folder(tmp_path, config)
    model = from_pretrained(tmp_path)
    inputs = make_inputs(config)
    expected = np.stack([RUN[name](config, arrays, row) for row in inputs])
    np.testing.assert_allclose(compute_logits(model, inputs), expected, atol=1e-5)


@pytest.mark.variants("full")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_back_byte_for_byte_with_its_config(name: str, tmp_path: Path) -> None:
    arrays = write_folder(tmp_path / "theirs", CONFIGS[name], shards=2)
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    model = from_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs", max_shard_size="1KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    written = read_arrays(tmp_path / "ours")
    assert written.keys() == arrays.keys()
    assert all(array.tobytes() == arrays[key].tobytes() for key, array in written.items())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    known = {key: value for key, value in CONFIGS[name].items() if value is not None}
    assert known.items() <= {**config}.items()
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert load_config(tmp_path / "ours") == model.config
    save_pretrained(model, tmp_path / "ours")  # one file in the place of the shards
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert eqx.tree_equal(from_pretrained(tmp_path / "ours"), model)


@pytest.mark.full
def test_transformers_computes_the_same_of_folders_of_both(tmp_path: Path) -> None:
    """In one process, because to import it takes longer than all it computes here."""
    check = subprocess.run([PYTHON, "-c", "import torch, transformers"], capture_output=True)
    if check.returncode:
        pytest.skip(
            "NOT RUN: torch and transformers are not installed. Name a Python that has them by "
            "TRANSFORMERS_PYTHON"
        )
    models = {}
    for number, (name, config) in enumerate({**CONFIGS, **VARIANTS}.items()):
        case = tmp_path / f"{number:02}"
        write_folder(case / "theirs", config, shards=2)
        models[name] = case, from_pretrained(case / "theirs", dtype=jnp.float32)
        model = from_pretrained(case / "theirs")
        save_pretrained(model, case / "ours", like=case / "theirs", max_shard_size="1KB")
        np.save(case / "inputs.npy", make_inputs(config))
        if name in GENERATING:
            rows = generate(models[name][1], PROMPTS, NEW).as_lists()
            ends = [rows[0][2], rows[1][4]]
            settings = {"prompts": PROMPTS, "new": NEW, "end": ends}
            (case / "prompts.json").write_text(json.dumps(settings))
    program = Path(__file__).with_name("transformers_logits.py")
    subprocess.run([PYTHON, program, tmp_path], check=True, timeout=300)

    for name, (case, model) in models.items():
        logits = compute_logits(model, np.load(case / "inputs.npy"))
        for written in ("theirs.npy", "ours.npy"):
            np.testing.assert_allclose(logits, np.load(case / written), atol=1e-5, err_msg=name)
        assert eqx.tree_equal(from_pretrained(case / "again", dtype=jnp.float32), model), name
        if name in GENERATING:
            whole, ended = json.loads((case / "generated.json").read_text())
            end = json.loads((case / "prompts.json").read_text())["end"]
            assert generate(model, PROMPTS, NEW).as_lists() == whole
            assert generate(model, PROMPTS, NEW, end=end).as_lists() == ended
            assert len(set(map(len, ended))) > 1


def test_names_of_older_files_are_read_as_well(tmp_path: Path) -> None:
    """Files of GPT-2 lack the prefix and have masks; a tied head may be written too."""
    arrays = write_folder(tmp_path, CONFIGS["gpt2"])
    model = from_pretrained(tmp_path)
    older = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    older["h.0.attn.bias"] = np.tril(np.ones((1, 1, 24, 24), np.float32))
    older["lm_head.weight"] = older["wte.weight"]
    save_file(older, tmp_path / "model.safetensors")
    assert eqx.tree_equal(from_pretrained(tmp_path), model)
    older["lm_head.weight"] = older["wte.weight"] + 1
    save_file(older, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are one array of the module, and they differ"):
        from_pretrained(tmp_path)


@pytest.mark.full
def test_a_folder_is_read_in_another_dtype_and_into_another_head(tmp_path: Path) -> None:
    arrays = write_folder(tmp_path, CONFIGS["vit"])
    half = from_pretrained(tmp_path, dtype=jnp.bfloat16)
    weights = jax.tree.leaves(eqx.filter(half, eqx.is_inexact_array))
    assert {str(leaf.dtype) for leaf in weights} == {"bfloat16"}
    save_pretrained(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert eqx.tree_equal(from_pretrained(tmp_path / "half"), half)

    config = replace(load_config(tmp_path), labels=("a", "b"))
    other = ViT(config, key=jax.random.key(0))
    with pytest.warns(UserWarning, match=r"(?s)head.weight of the module is \[2, 12\]"):
        filled = from_pretrained(tmp_path, into=other, strict=False)
    assert eqx.tree_equal(filled.head, other.head)
    label = arrays["vit.embeddings.cls_token"]
    assert np.array_equal(filled.patches.label, label)
    with pytest.raises(CheckpointError, match="classifier.weight is float32"):
        from_pretrained(tmp_path, into=other)
    with pytest.raises(ConfigurationError, match="strict=False leaves arrays"):
        from_pretrained(tmp_path, strict=False)
    with pytest.raises(ConfigurationError, match="MLP is given where the model of a folder of vit"):
        from_pretrained(tmp_path, into=eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)))


REFUSED = {
    "use_sliding_window": True,
    "hidden_act": "relu",
    "hidden_size": 10**30,
    "num_hidden_layers": -3,
    "num_attention_heads": "many",
    "num_key_value_heads": 5,
    "rms_norm_eps": float("nan"),
    "attention_dropout": 2,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": "false",
    "mlp_bias": 1,
    "model_type": "../llama",
}
ROTATIONS = {
    "the rotation of positions 'yarn' is not built": {"rope_type": "yarn"},
    "the rotation of positions 'dynamic' is not built": {"rope_type": "dynamic", "factor": 2.0},
    "the rotation of positions 'longrope' is not built": {"type": "longrope"},
    "the rotation of positions 'linear' has no factor": {"rope_type": "linear"},
    "'llama3' has no original_max_position_embeddings": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "low must be below high": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rope_type is 3; it must be a string": {"rope_type": 3},
    "partial_rotary_factor is 0.25": {"rope_type": "default", "partial_rotary_factor": 0.25},
}


@pytest.mark.full
def test_a_config_with_what_the_model_has_not_is_refused_by_its_name(tmp_path: Path) -> None:
    configs: list[Any] = [({key: value}, key) for key, value in REFUSED.items()]
    configs.append(({"head_dim": 3}, "a head of 3 numbers has no halves to turn"))
    configs += [({"rope_parameters": value}, text) for text, value in ROTATIONS.items()]
    configs += [({"rope_parameters": None, "rope_scaling": v}, t) for t, v in ROTATIONS.items()]
    for values, text in configs:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **values}))
        with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
            load_config(tmp_path)
        assert len(str(caught.value)) < 1_000


PUBLISHED = {
    "Llama 3.2 1B": {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Qwen2.5 0.5B": {
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


def test_configs_as_they_are_published_are_read(tmp_path: Path) -> None:
    """Also null, which transformers writes for what is left out."""
    configs = []
    for values in PUBLISHED.values():
        for added in ({}, {"layer_types": None, "rope_parameters": None, "attention_bias": None}):
            (tmp_path / "config.json").write_text(json.dumps({**values, **added}))
            configs.append(load_config(tmp_path))
    llama, same_llama, qwen2, same_qwen2 = configs
    assert llama == same_llama and qwen2 == same_qwen2
    assert llama == LlamaConfig(
        vocab_size=128256,
        width=2048,
        depth=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_width=8192,
        max_length=131072,
        norm_eps=1e-5,
        rope=Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        is_tied=True,
    )
    assert qwen2.rope == Rope(1000000.0) and qwen2.get_head_size() == 64
    assert qwen2.use_qkv_bias and not qwen2.use_output_bias and qwen2.num_kv_heads == 2


def test_a_config_of_larger_sizes_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA_CONFIG)
    huge = {**LLAMA_CONFIG, "num_hidden_layers": 2**30, "intermediate_size": 2**30}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    with pytest.raises(CheckpointError, match="does not fit the module"):
        from_pretrained(tmp_path)


def test_a_folder_that_is_none_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder .*/nothing: check the path"):
        from_pretrained(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="there is no file .*config.json"):
        from_pretrained(tmp_path)
    write_folder(tmp_path, LLAMA_CONFIG)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="may hold a pickle"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(
        CheckpointError, match="no family of models is known by it. Did you mean 'llama'"
    ):
        from_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="MLP is the class of no family"):
        save_pretrained(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), tmp_path)


def test_numbers_of_another_kind_never_come_into_a_model(tmp_path: Path) -> None:
    """They would be trained on by nothing, and change what a norm computes."""
    arrays = write_folder(tmp_path, GPT2_CONFIG)
    name = "transformer.ln_f.weight"
    for dtype, text in (
        (np.int32, "the file has int32 and the module float32, and one is never cast"),
        (np.bool_, "the file has bool and the module float32, and one is never cast"),
        (np.complex64, "the file has complex64 and the module float32, and one is never cast"),
        (np.float64, "the file has float64, which needs jax.config"),
    ):
        save_file({**arrays, name: arrays[name].astype(dtype)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"norm.weight .*from {name}: {text}"):
            from_pretrained(tmp_path)
        if dtype is not np.float64:
            with pytest.raises(CheckpointError, match=text):
                from_pretrained(tmp_path, dtype=jnp.float32)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    assert model.norm.weight.dtype == jnp.float32
    assert np.array_equal(model.norm.weight, arrays[name])


def test_a_folder_of_another_family_is_not_what_a_model_came_from(tmp_path: Path) -> None:
    write_folder(tmp_path / "llama", LLAMA_CONFIG)
    write_folder(tmp_path / "gpt2", GPT2_CONFIG)
    model = from_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        ConfigurationError, match="is the folder of a 'llama', and the model is a 'gpt2'"
    ):
        save_pretrained(model, tmp_path / "new", like=tmp_path / "llama")
    with pytest.raises(CheckpointError, match="there is no folder .*/nothing: check the path"):
        save_pretrained(model, tmp_path / "new", like=tmp_path / "nothing")
    assert not (tmp_path / "new").exists()


def test_folders_in_a_home_and_with_the_suffix_of_a_pickle_are_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    gpt2 = GPT2(GPT2Config(8, 6, 8, 1, 2), key=jax.random.key(0))
    save_pretrained(gpt2, "~/model.pt")
    save_pretrained(gpt2, Path("~/again"), like="~/model.pt")
    for name in ("model.pt", "again"):
        assert eqx.tree_equal(from_pretrained(f"$HOME/{name}"), gpt2)
        assert load_config(f"~/{name}") == gpt2.config
        assert (tmp_path / name / "config.json").is_file()
    with pytest.raises(ConfigurationError, match="is a folder here, of which there are no revis"):
        from_pretrained("~/again", revision="main")


def test_no_folder_is_made_for_a_model_that_cannot_be_written(tmp_path: Path) -> None:
    gpt2 = GPT2(GPT2Config(8, 6, 8, 1, 2), key=jax.random.key(0))
    head = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    headed = eqx.tree_at(lambda gpt2: gpt2.head, gpt2, head, is_leaf=lambda leaf: leaf is None)
    with pytest.raises(ConfigurationError, match="there is no name for head.bias, head.weight"):
        save_pretrained(headed, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_is_written_beside_other_files_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model_ema.safetensors").write_bytes(b"of the user")
    save_pretrained(GPT2(GPT2Config(8, 6, 8, 1, 2), key=jax.random.key(0)), tmp_path)
    assert (tmp_path / "model_ema.safetensors").read_bytes() == b"of the user"


def test_shapes_that_are_filled_keep_their_sharding_in_another_dtype(tmp_path: Path) -> None:
    gpt2 = GPT2(GPT2Config(8, 6, 8, 1, 2), key=jax.random.key(0))
    save_pretrained(gpt2, tmp_path)
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            if eqx.is_array(leaf)
            else leaf
        ),
        gpt2,
    )
    weight = from_pretrained(tmp_path, into=shapes, dtype=jnp.bfloat16).embedding.weight
    assert weight.dtype == jnp.bfloat16 and weight.sharding == sharding


def test_a_changed_rotation_is_written_past_that_of_an_older_folder(tmp_path: Path) -> None:
    """transformers 4 reads `rope_theta` and `rope_scaling` alone, and 5 prefers them."""
    older = {**LLAMA_CONFIG, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    write_folder(tmp_path / "theirs", older)
    model = from_pretrained(tmp_path / "theirs")
    assert model.config.rope == Rope(500.0, "linear", 2.0)
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0}
    for rope, scaling in ((Rope(900.0), None), (Rope(900.0, "linear", 4.0), scaled)):
        changed = Llama(replace(model.config, rope=rope), key=jax.random.key(0))
        save_pretrained(changed, tmp_path / "ours", like=tmp_path / "theirs")
        values = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert values["rope_scaling"] == scaling and values["rope_theta"] == 900.0
        assert load_config(tmp_path / "ours").rope == rope


def test_a_folder_names_the_layers_of_the_depth_that_a_model_has_now(tmp_path: Path) -> None:
    theirs = {**QWEN3_CONFIG, "layer_types": ["full_attention"] * 3}
    write_folder(tmp_path / "theirs", theirs)
    shallow = replace(load_config(tmp_path / "theirs"), depth=2)
    model = Llama(shallow, key=jax.random.key(0))
    save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert values["layer_types"] == ["full_attention"] * 2


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("llama", "use_qk_norm"), ("llama", "use_output_bias"), ("qwen2", "use_mlp_bias")],
)
def test_a_layer_that_a_config_cannot_name_is_not_lost_in_a_folder(
    model_type: Any, name: str, tmp_path: Path
) -> None:
    """transformers would read the folder without these arrays."""
    config = LlamaConfig(
        8, 8, 1, 2, 2, 8, model_type=model_type, use_qkv_bias=model_type != "llama"
    )
    flags: dict[str, Any] = {name: True}
    model = Llama(replace(config, **flags), key=jax.random.key(0))
    with pytest.raises(ConfigurationError, match=f"{name} is True, which the config.json of a"):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_a_model_in_float16_computes_what_plain_numpy_does(tmp_path: Path) -> None:
    """XLA has no product of float16 with sums in float32, as `jax.nn` asks for, on CPUs."""
    for name in ("gpt2", "llama"):
        arrays = write_folder(tmp_path / name, CONFIGS[name])
        model = from_pretrained(tmp_path / name, dtype=jnp.float16)
        inputs = make_inputs(CONFIGS[name])
        logits = compute_logits(model, inputs)
        assert logits.dtype == np.float16
        expected = np.stack([RUN[name](CONFIGS[name], arrays, row) for row in inputs])
        np.testing.assert_allclose(logits, expected, atol=2e-2)
        prompts = [row[:3].tolist() for row in inputs]
        assert all(len(row) == 4 for row in generate(model, prompts, 4).as_lists())


@pytest.mark.full
@pytest.mark.optimized
def test_a_model_of_one_head_in_bfloat16_computes_what_it_does_in_float32() -> None:
    """XLA has no product of bfloat16 with sums in float32 for one head on CPUs."""
    gpt2 = GPT2(GPT2Config(16, 16, 8, 1, 1), key=jax.random.key(0))
    low = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, gpt2
    )
    for time in (1, 3, 8):
        tokens = jnp.arange(time)
        np.testing.assert_allclose(eqx.filter_jit(low)(tokens), gpt2(tokens), atol=1e-2)


@pytest.mark.full
@pytest.mark.optimized
def test_attention_with_dropout_is_as_exact_in_bfloat16_as_without() -> None:
    """Scores of 8 bits would be wrong by more than the weights of attention are."""
    config = GPT2Config(64, 64, 64, 1, 2, attention_dropout=1e-9)
    sharp = eqx.tree_at(
        lambda model: [model.blocks.attention.query.weight, model.blocks.attention.key.weight],
        GPT2(config, key=jax.random.key(0)),
        replace_fn=lambda weight: 8 * weight,
    )
    low = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, sharp
    )
    tokens = jnp.arange(64)
    exact = np.asarray(eqx.nn.inference_mode(sharp)(tokens))
    dropping = np.asarray(low(tokens, key=jax.random.key(1)), np.float32)
    still = np.asarray(eqx.nn.inference_mode(low)(tokens), np.float32)
    assert np.abs(dropping - still).mean() < 0.1 * np.abs(still - exact).mean()


@pytest.mark.parametrize("size", [256, 300])
def test_tokens_of_bytes_are_those_of_a_vocabulary_that_bytes_cannot_count(size: int) -> None:
    gpt2 = GPT2(GPT2Config(size, 16, 8, 1, 2), key=jax.random.key(0))
    for dtype, tokens in ((np.uint8, [0, 7, 255, 128]), (np.int8, [0, 7, 127, 1])):
        few = jnp.asarray(tokens, dtype)
        np.testing.assert_array_equal(gpt2(few), gpt2(jnp.asarray(tokens, jnp.int32)))
    unknown = gpt2(jnp.asarray([3, -1, 4], jnp.int8))
    assert np.isnan(unknown).all()


def test_what_a_model_has_no_position_or_slot_for_is_nan() -> None:
    """An index of JAX that is too large would mean the last one."""
    gpt2 = GPT2(GPT2Config(8, 6, 8, 1, 2), key=jax.random.key(0))
    tokens = jnp.arange(3)
    logits = gpt2(tokens, None, jnp.array([0, 1, 6]))
    assert np.isnan(logits[2]).all()
    _, cache = gpt2.decode(tokens, gpt2.make_cache(4))
    assert np.isnan(gpt2.decode(tokens[:2], cache, start=3)[0]).all()
    logits, _ = gpt2.decode(tokens[:1], cache, start=3)
    np.testing.assert_allclose(logits[0], gpt2(jnp.array([0, 1, 2, 0]))[-1], atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_scaled_rotations_have_the_frequencies_of_their_papers(kind: Any) -> None:
    rope = Rope(theta=500.0, kind=kind, factor=8.0, low=1.0, high=4.0, length=64)
    expected = []
    for pair in range(8):
        frequency = 500.0 ** (-2 * pair / 16)
        wave = 2 * np.pi / frequency
        if kind == "linear" or (kind == "llama3" and wave > 64 / 1.0):
            frequency /= 8
        elif kind == "llama3" and wave >= 64 / 4.0:
            smooth = (64 / wave - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency)
    np.testing.assert_allclose(rope.make_frequencies(16), expected, rtol=1e-5)


@pytest.mark.full
def test_a_token_sees_its_own_document_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA_CONFIG)
    llama = from_pretrained(tmp_path)
    first, second = make_inputs(LLAMA_CONFIG, 2, 5)
    packed = np.concatenate([first, second])
    segments, positions = np.repeat([1, 2], 5), np.tile(np.arange(5), 2)
    logits = llama(jnp.asarray(packed), jnp.asarray(segments), jnp.asarray(positions))
    np.testing.assert_allclose(logits[:5], llama(jnp.asarray(first)), atol=1e-5)
    np.testing.assert_allclose(logits[5:], llama(jnp.asarray(second)), atol=1e-5)


@pytest.mark.full
def test_dropout_needs_a_key_and_keeps_means() -> None:
    config = GPT2Config(8, 16, 8, 2, 2, dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5)
    gpt2 = GPT2(config, key=jax.random.key(0))
    tokens = jnp.arange(8)
    with pytest.raises(RuntimeError, match="requires a key"):
        gpt2(tokens)
    draws = [gpt2(tokens, key=jax.random.key(seed)) for seed in (1, 1, 2)]
    assert jnp.array_equal(draws[0], draws[1]) and not jnp.array_equal(draws[0], draws[2])
    # Each kind of dropout draws where the others are switched off.
    for name in ("dropout", "embedding_dropout", "attention_dropout"):
        rates: dict[str, Any] = {name: 0.5}
        config = replace(GPT2Config(8, 16, 8, 2, 2), **rates)
        dropping = GPT2(config, key=jax.random.key(0))
        still = eqx.nn.inference_mode(dropping)
        assert not jnp.allclose(dropping(tokens, key=jax.random.key(1)), still(tokens))
    # Both ways of attention are one where nothing is dropped.
    config = GPT2Config(8, 16, 8, 2, 2, attention_dropout=1e-9)
    nothing = GPT2(config, key=jax.random.key(0))
    quiet = nothing(tokens, key=jax.random.key(1))
    np.testing.assert_allclose(quiet, eqx.nn.inference_mode(nothing)(tokens), atol=1e-6)


@pytest.mark.full
def test_sizes_that_do_not_go_together_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="6 heads cannot share 4"):
        LlamaConfig(num_heads=6, num_kv_heads=4)
    with pytest.raises(ConfigurationError, match="a head of 3 numbers has no halves"):
        LlamaConfig(width=12, num_heads=4, num_kv_heads=4)
    with pytest.raises(ConfigurationError, match="LlamaConfig: num_kv_heads is 0; it must be a po"):
        LlamaConfig(num_kv_heads=0)
    with pytest.raises(ConfigurationError, match="GPT2Config: num_heads is 3, which does not div"):
        GPT2Config(width=10, num_heads=3)
    with pytest.raises(ConfigurationError, match="ViTConfig: patch_size is 4, which does not div"):
        ViTConfig(("a", "b"), image_size=9, patch_size=4)
    assert type(GPT2Config(width=np.int64(24)).width) is int  # type: ignore[arg-type]
    assert ViTConfig(["a", "b"]) == ViTConfig(("a", "b"))  # type: ignore[arg-type]
    gpt2 = GPT2(GPT2Config(8, 4, 8, 1, 2), key=jax.random.key(0))
    with pytest.raises(ModelError, match="GPT2 has 4 positions, and gets 5 tokens"):
        gpt2(jnp.zeros(5, int))


@pytest.mark.usefixtures("unchecked")
def test_what_are_no_tokens_of_one_example_is_an_error_that_says_so() -> None:
    gpt2: Any = GPT2(GPT2Config(8, 4, 8, 1, 2), key=jax.random.key(0))
    tokens = jnp.arange(3)
    faulty: dict[str, Any] = {
        r"at least one, and gets int32\[2, 3\]: jax.vmap\(model\)\(tokens\) is for a batch": (
            jnp.zeros((2, 3), int),
        ),
        r"at least one, and gets int32\[\]$": (jnp.int32(1),),
        r"at least one, and gets int32\[0\]$": (jnp.zeros(0, int),),
        "at least one, and gets list": ([1, 2],),
        r"tokens are float32\[3\]; they must be integers \[3\]": (jnp.ones(3),),
        r"tokens are bool\[3\]; they must be integers": (jnp.ones(3, bool),),
        r"segments are int32\[2\]; they must be integers \[3\]": (tokens, jnp.arange(2)),
        r"positions are float32\[3\]; they must be integers": (tokens, None, jnp.ones(3)),
    }
    for text, arguments in faulty.items():
        with pytest.raises(ModelError, match=text):
            gpt2(*arguments)


@pytest.mark.full
def test_compiling_does_not_take_longer_for_more_blocks() -> None:
    def count_lines(depth: int) -> int:
        config = LlamaConfig(16, 8, depth, 2, 1, 16)
        shapes = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
        arrays, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        lowered = jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x)).lower(
            arrays, jax.ShapeDtypeStruct((4,), jnp.int32)
        )
        return len(lowered.as_text().splitlines())

    assert count_lines(2) == count_lines(40)
