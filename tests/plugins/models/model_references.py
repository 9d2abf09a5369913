"""The models in plain NumPy, from arrays under the names of Hugging Face, and folders of such.

They share no code with the models that are tested: loops over layers and heads, in float64.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 for NumPy
import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]


def softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attend(query: Any, key: Any, value: Any, num_heads: int, num_kv: int, causal: bool) -> Any:
    """Attention head by head; each array is `(time, heads * size)`."""
    time = len(query)
    size = query.shape[1] // num_heads
    heads = []
    for head in range(num_heads):
        shared = head // (num_heads // num_kv)
        q = query[:, head * size : (head + 1) * size]
        k = key[:, shared * size : (shared + 1) * size]
        v = value[:, shared * size : (shared + 1) * size]
        scores = q @ k.T / math.sqrt(size)
        if causal:
            scores[np.triu_indices(time, 1)] = -np.inf
        heads.append(softmax(scores) @ v)
    return np.concatenate(heads, -1)


def run_gpt2(config: dict[str, Any], arrays: Arrays, tokens: Any) -> Any:
    """The logits of one row of tokens."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    eps = config["layer_norm_epsilon"]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        y = layer_norm(x, w[f"{at}.ln_1.weight"], w[f"{at}.ln_1.bias"], eps)
        qkv = y @ w[f"{at}.attn.c_attn.weight"] + w[f"{at}.attn.c_attn.bias"]
        y = attend(*np.split(qkv, 3, -1), config["n_head"], config["n_head"], True)
        x = x + y @ w[f"{at}.attn.c_proj.weight"] + w[f"{at}.attn.c_proj.bias"]
        y = layer_norm(x, w[f"{at}.ln_2.weight"], w[f"{at}.ln_2.bias"], eps)
        y = y @ w[f"{at}.mlp.c_fc.weight"] + w[f"{at}.mlp.c_fc.bias"]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w[f"{at}.mlp.c_proj.weight"] + w[f"{at}.mlp.c_proj.bias"]
    x = layer_norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"], eps)
    return x @ w.get("lm_head.weight", w["transformer.wte.weight"]).T


def turn(x: Any, num_heads: int, theta: float) -> Any:
    """Rotate each pair of a head's halves by its position, as a complex number."""
    time = len(x)
    heads = x.reshape(time, num_heads, -1)
    half = heads.shape[-1] // 2
    pairs = heads[..., :half] + 1j * heads[..., half:]
    speeds = theta ** (-np.arange(half) / half)
    turned = pairs * np.exp(1j * np.arange(time)[:, None, None] * speeds)
    return np.concatenate([turned.real, turned.imag], -1).reshape(time, -1)


def run_llama(config: dict[str, Any], arrays: Arrays, tokens: Any) -> Any:
    """The logits of one row of tokens, of Llama, Qwen2 and Qwen3."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    eps = config["rms_norm_eps"]
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]

    def project(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm_heads(x: Any, name: str, heads: int) -> Any:
        if f"{name}.weight" not in w:
            return x
        parts = x.reshape(len(x), heads, -1)
        return rms_norm(parts, w[f"{name}.weight"], eps).reshape(len(x), -1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
        query = norm_heads(
            project(y, f"{at}.self_attn.q_proj"), f"{at}.self_attn.q_norm", num_heads
        )
        key = norm_heads(project(y, f"{at}.self_attn.k_proj"), f"{at}.self_attn.k_norm", num_kv)
        value = project(y, f"{at}.self_attn.v_proj")
        query, key = turn(query, num_heads, theta), turn(key, num_kv, theta)
        y = attend(query, key, value, num_heads, num_kv, True)
        x = x + project(y, f"{at}.self_attn.o_proj")
        y = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate = project(y, f"{at}.mlp.gate_proj")
        gate = gate / (1 + np.exp(-gate))
        x = x + project(gate * project(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    x = rms_norm(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def run_vit(config: dict[str, Any], arrays: Arrays, image: Any) -> Any:
    """The logits of one image, `(channels, height, width)`."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    eps, size = config["layer_norm_eps"], config["patch_size"]

    def project(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    kernel = w["vit.embeddings.patch_embeddings.projection.weight"]
    patches = []
    for row in range(0, image.shape[1], size):
        for column in range(0, image.shape[2], size):
            patch = image[:, row : row + size, column : column + size]
            patches.append((kernel * patch).sum((1, 2, 3)))
    vectors = np.stack(patches) + w["vit.embeddings.patch_embeddings.projection.bias"]
    x = np.concatenate([w["vit.embeddings.cls_token"][0], vectors])
    x = x + w["vit.embeddings.position_embeddings"][0]
    heads = config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"vit.encoder.layer.{layer}"
        y = layer_norm(x, w[f"{at}.layernorm_before.weight"], w[f"{at}.layernorm_before.bias"], eps)
        parts = [project(y, f"{at}.attention.attention.{n}") for n in ("query", "key", "value")]
        x = x + project(attend(*parts, heads, heads, False), f"{at}.attention.output.dense")
        y = layer_norm(x, w[f"{at}.layernorm_after.weight"], w[f"{at}.layernorm_after.bias"], eps)
        y = project(y, f"{at}.intermediate.dense")
        y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        x = x + project(y, f"{at}.output.dense")
    x = layer_norm(x, w["vit.layernorm.weight"], w["vit.layernorm.bias"], eps)
    return project(x[0], "classifier")


# --- folders as transformers has them -------------------------------------------------------------

GPT2_CONFIG = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "vocab_size": 17,
    "n_positions": 24,
    "n_embd": 12,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 16,
    "eos_token_id": 16,
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_CONFIG = {
    **{name: value for name, value in LLAMA_CONFIG.items() if name != "head_dim"},
    "model_type": "qwen2",
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
QWEN3_CONFIG = {**LLAMA_CONFIG, "model_type": "qwen3"}
VIT_CONFIG = {
    "model_type": "vit",
    "hidden_act": "gelu",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "id2label": {"0": "cat", "1": "dog", "2": "eel"},
    "label2id": {"cat": 0, "dog": 1, "eel": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "an untied GPT-2": {**GPT2_CONFIG, "tie_word_embeddings": False},
    "one head of keys, tied, and waves as of Llama 3": {
        **LLAMA_CONFIG,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 500.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "as many heads of keys, biases, and positions divided": {
        **LLAMA_CONFIG,
        "num_key_value_heads": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
    },
    "a rotation as older files have it": {
        **{name: value for name, value in LLAMA_CONFIG.items() if name != "rope_parameters"},
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "a Llama in bfloat16": {**LLAMA_CONFIG, "dtype": "bfloat16"},
    "an untied Qwen2": {
        **QWEN2_CONFIG,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
    },
    "a tied Qwen3": {**QWEN3_CONFIG, "tie_word_embeddings": True},
    "a ViT without biases of queries": {**VIT_CONFIG, "qkv_bias": False},
}
"""What else there is within the families, which transformers itself is the reference for."""
CONFIGS = {
    "gpt2": GPT2_CONFIG,
    "llama": LLAMA_CONFIG,
    "qwen2": QWEN2_CONFIG,
    "qwen3": QWEN3_CONFIG,
    "vit": VIT_CONFIG,
}
RUN = {
    "gpt2": run_gpt2,
    "llama": run_llama,
    "qwen2": run_llama,
    "qwen3": run_llama,
    "vit": run_vit,
}


def list_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model's arrays, as transformers writes them."""
    kind = config["model_type"]
    if kind == "gpt2":
        return _list_gpt2_shapes(config)
    if kind == "vit":
        return _list_vit_shapes(config)
    return _list_llama_shapes(config)


def _list_gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    layers = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    layers |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        for name, shape in layers.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{name}.weight": (width,), f"{at}.{name}.bias": (width,)}
    return shapes


def _list_llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, hidden = config["hidden_size"], config["intermediate_size"]
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
            f"{at}.self_attn.q_proj.weight": (num_heads * size, width),
            f"{at}.self_attn.k_proj.weight": (num_kv * size, width),
            f"{at}.self_attn.v_proj.weight": (num_kv * size, width),
            f"{at}.self_attn.o_proj.weight": (width, num_heads * size),
            f"{at}.mlp.gate_proj.weight": (hidden, width),
            f"{at}.mlp.up_proj.weight": (hidden, width),
            f"{at}.mlp.down_proj.weight": (width, hidden),
        }
        if config.get("attention_bias"):
            for part, size_out in (
                ("q", num_heads * size),
                ("k", num_kv * size),
                ("v", num_kv * size),
                ("o", width),
            ):
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (size_out,)
        if config.get("mlp_bias"):
            for part, size_out in (("gate", hidden), ("up", hidden), ("down", width)):
                shapes[f"{at}.mlp.{part}_proj.bias"] = (size_out,)
        if config["model_type"] == "qwen2":
            for part, heads in (("q", num_heads), ("k", num_kv), ("v", num_kv)):
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (heads * size,)
        if config["model_type"] == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = (size,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (size,)
    return shapes


def _list_vit_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, hidden, size = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    num_patches = (config["image_size"] // size) ** 2
    embeddings = "vit.embeddings"
    shapes: dict[str, tuple[int, ...]] = {
        f"{embeddings}.cls_token": (1, 1, width),
        f"{embeddings}.position_embeddings": (1, num_patches + 1, width),
        f"{embeddings}.patch_embeddings.projection.weight": (
            width,
            config["num_channels"],
            size,
            size,
        ),
        f"{embeddings}.patch_embeddings.projection.bias": (width,),
    }
    layers = {"classifier": (len(config["id2label"]), width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"vit.encoder.layer.{layer}"
        for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
            layers[f"{at}.attention.{part}"] = (width, width)
        layers[f"{at}.intermediate.dense"] = (hidden, width)
        layers[f"{at}.output.dense"] = (width, hidden)
        for name in ("layernorm_before", "layernorm_after"):
            shapes |= {f"{at}.{name}.weight": (width,), f"{at}.{name}.bias": (width,)}
    shapes |= {"vit.layernorm.weight": (width,), "vit.layernorm.bias": (width,)}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    if not config["qkv_bias"]:
        projections = ("attention.query.bias", "attention.key.bias", "attention.value.bias")
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(projections)}
    return shapes


def make_arrays(config: dict[str, Any], seed: int = 0) -> Arrays:
    """Random arrays, none of which is 0 or 1 as initial ones may be."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.4 * rng.normal(size=shape)).astype(config.get("dtype", np.float32))
        for name, shape in list_shapes(config).items()
    }


def make_inputs(config: dict[str, Any], number: int = 2, length: int = 9) -> Any:
    """A batch of what the model takes: tokens, or images."""
    rng = np.random.default_rng(1)
    if config["model_type"] == "vit":
        size = config["image_size"]
        return rng.normal(size=(number, config["num_channels"], size, size)).astype(np.float32)
    return rng.integers(0, config["vocab_size"], (number, length))


def write_folder(folder: Path, config: dict[str, Any], shards: int = 1) -> Arrays:
    """Write a folder as transformers does, and return its arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = make_arrays(config)
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return arrays
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(arrays.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return arrays
