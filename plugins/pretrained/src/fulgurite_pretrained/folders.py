"""Folders as transformers writes them: config.json, weights, and the files of a tokenizer."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import find_wholes

from fulgurite_pretrained.families import (
    Family,
    check_is_of_family,
    find_family,
    find_family_of_model,
)
from fulgurite_pretrained.files import WEIGHTS_NAME, expand_path, open_weights, read_json
from fulgurite_pretrained.matching import Casting
from fulgurite_pretrained.reading import (
    Shardings,
    fill_shapes,
    list_needed,
    read_arrays,
    replace_arrays,
)
from fulgurite_pretrained.writing import write_json, write_weights

CONFIG_NAME = "config.json"
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""The files of a folder, beside config and weights, that `save_pretrained(like=)` copies."""
_DOWNLOADED = (CONFIG_NAME, "*.safetensors", "*.safetensors.index.json", *COMPANIONS)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    into: Any = None,
    dtype: Any = None,
    strict: bool = True,
    shardings: Shardings = None,
    revision: str | None = None,
    families: tuple[Family, ...] = (),
) -> Any:
    """Return the model of a folder as transformers writes it: `config.json` and safetensors.

    Args:
        source: the folder; or the name of a model on the hub, such as `openai-community/gpt2`, for
            which `huggingface-hub` must be installed.
        into: a model of the same family that is filled, such as one with another head; by default
            the one that config.json describes.
        dtype: the dtype of its floating-point arrays; None for that of the files, or of `into`.
        strict: whether all arrays of both sides must fit. Otherwise what fits is taken, also from
            a folder whose head has another shape, and a warning lists the rest, which stays as
            `into` has it.
        shardings: where the arrays go: a `jax.sharding.Sharding`, or a function of path and shape
            that returns one. No array is ever whole on a device that is to have a part of it.
        revision: of a model on the hub: a branch, tag or commit.
        families: kinds of models that are known beside those that are installed.

    Raises:
        CheckpointError: there is no such folder, its model belongs to no known family or has
            something that the family's class has not, or the weights do not fit.

    Example:
        from fulgurite_models import GPT2, GPT2Config
        from fulgurite_pretrained import from_pretrained, save_pretrained

        config = GPT2Config(vocab_size=32, max_length=16, width=8, depth=2, num_heads=2)
        save_pretrained(GPT2(config, key=jax.random.key(0)), "gpt2")
        model = from_pretrained("gpt2")
    """
    folder = find_folder(source, revision)
    family, config = read_config(folder, families)
    if into is None:
        if not strict:
            raise ConfigurationError(
                "from_pretrained: strict=False leaves arrays as they are in into=, and that is "
                "missing: give the model to fill"
            )
        make_model = partial(family.model, config)
        template = eqx.filter_eval_shape(lambda key: make_model(key=key), jax.random.key(0))
        casting: Casting = "file" if dtype is None else "match"
    else:
        check_is_of_family(into, family)
        template = into
        casting = "match"
    template = template if dtype is None else cast(template, dtype)
    needed = list_needed(template, shardings)
    with open_weights(folder) as files:
        path_map = family.make_map_for(template.config, files.arrays)
        arrays = read_arrays(
            files,
            needed,
            path_map,
            dtype=casting,
            strict=strict,
            wholes=find_wholes(template),
        )
    filled = replace_arrays(template, arrays)
    if into is not None:
        return filled
    return fill_shapes(filled, lambda: family.model(config, key=jax.random.key(0)))


def load_config(source: str | os.PathLike[str], *, families: tuple[Family, ...] = ()) -> Any:
    """Return the `config` of the model of a folder, such as a `GPT2Config`, from which its class
    makes a model without these weights.

    Args:
        source: the folder, or the name of a model on the hub.
        families: kinds of models that are known beside those that are installed.

    Raises:
        CheckpointError: there is no such folder, or its model belongs to no known family.
    """
    return read_config(find_folder(source), families)[1]


def save_pretrained(
    module: Any,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = "5GB",
    families: tuple[Family, ...] = (),
) -> None:
    """Write a model as a folder that transformers and `from_pretrained` read.

    Args:
        module: the model, without adapters: those are merged and removed first.
        folder: where to; it is made if there is none.
        like: the folder, or the name on the hub, that the model came from: the files of its
            tokenizer are copied, and what its config.json says that the model does not know, such
            as the ids of special tokens.
        max_shard_size: of a file of weights, in bytes or such as `"5GB"`; None for one file.
        families: kinds of models that are known beside those that are installed.

    Raises:
        ConfigurationError: the model belongs to no known family, or `like` to another one.

    Example:
        from fulgurite_models import GPT2, GPT2Config
        from fulgurite_pretrained import save_pretrained

        config = GPT2Config(vocab_size=32, max_length=16, width=8, depth=2, num_heads=2)
        save_pretrained(GPT2(config, key=jax.random.key(0)), "gpt2")
    """
    family = find_family_of_model(module, families)
    source = None if like is None else find_folder(like)
    values = {} if source is None else _read_source_config(family, source)
    values |= {
        **family.write_config(module.config),
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": _find_dtype(module),
    }
    values.pop("torch_dtype", None)  # what `dtype` was called
    folder = expand_path(folder)
    write_weights(
        module,
        folder / WEIGHTS_NAME,
        family.make_map(module.config),
        max_shard_size,
        {"format": "pt"},  # which transformers asks for
    )
    write_json(folder / CONFIG_NAME, values)
    if source is not None and source.resolve() != folder.resolve():
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


def read_config(folder: Path, families: tuple[Family, ...] = ()) -> tuple[Family, Any]:
    """Return the family of a folder's model, and the config of the model.

    Args:
        folder: with a config.json.
        families: kinds of models that are known beside those that are installed.

    Raises:
        CheckpointError: there is no config.json, or its model is not known.
    """
    path = folder / CONFIG_NAME
    values = read_json(path)
    family = find_family(values.get("model_type"), families)
    try:
        return family, family.read_config(values)
    except ConfigurationError as error:
        raise CheckpointError(f"{path}: {error}") from error


def find_folder(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a model, downloaded if it is the name of one on the hub.

    Args:
        source: a folder or a name.
        revision: a branch, tag or commit of the name.

    Raises:
        CheckpointError: there is none.
        ConfigurationError: there is a folder, which has no revisions.
    """
    folder = expand_path(source)
    if folder.is_dir():
        if revision is not None:
            raise ConfigurationError(
                f"{folder} is a folder here, of which there are no revisions: leave revision out, "
                "or, for a model of that name on the hub, start in another folder"
            )
        return folder
    text = os.fspath(source)
    if folder.exists() or not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"there is no folder {text}: check the path")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"there is no folder {text}, and to take it for a model on the hub needs: pip install "
            "huggingface-hub"
        ) from error
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=[*_DOWNLOADED]))
    except Exception as error:
        raise CheckpointError(
            f"there is no folder {text}, and the hub gave none: {type(error).__name__}: "
            f"{str(error)[:500]}"
        ) from error


def cast(module: Any, dtype: Any) -> Any:
    """Return a module, or its shapes, whose floating-point arrays have a dtype."""

    def cast_leaf(leaf: Any) -> Any:
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)
        return leaf.astype(dtype)

    return jax.tree.map(cast_leaf, module)


def _read_source_config(family: Family, folder: Path) -> dict[str, Any]:
    """Return what the config.json of a folder holds; a ConfigurationError if it is of another
    family: its tokenizer and its special tokens are those of another model."""
    values = read_json(folder / CONFIG_NAME)
    model_type = values.get("model_type")
    if model_type != family.model_type:
        raise ConfigurationError(
            f"save_pretrained: like={str(folder)!r} is the folder of a {model_type!r:.100}, and "
            f"the model is a {family.model_type!r}: give the folder that it came from, or leave "
            "like out"
        )
    return values


def _find_dtype(module: Any) -> str:
    """Return the dtype of most numbers of a model."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array)):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name], default="float32")
