"""Models by name: `load` reads every kind of model the library knows, `save` writes its own folders.

A folder of ours holds `effml.json` (`{"format": 1, "kind": ..., "config": ...}`), `model.safetensors`
(tensors named by their path in the parameter tree) and the tokenizer's files. The `kind` chooses its reader.

    >>> from effml import models
    >>> model = models.load("smollm2")  # doctest: +SKIP
    >>> model.forward(model.params, model.tokenizer.encode("Hello")[None]).logits.shape  # doctest: +SKIP
    (1, 1, 49152)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml._validate import missing_package, one_of
from effml.nn import hub
from effml.nn.hub import _files, _names
from effml.nn.transformer import TransformerConfig, forward
from effml.trees import path_name

__all__ = ["KINDS", "LoadedModel", "load", "register_kind", "save"]

_META, _WEIGHTS, _TOKENIZER = "effml.json", "model.safetensors", "effml_tokenizer.json"
_FOLDER_FILES = [_META, _WEIGHTS, _TOKENIZER, "tokenizer.json", "result.json"]
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        name: what it was loaded as, without the path.
        kind: "dense", "packed", "binary", "ssa", or another kind that `register_kind` was told of.
        config: its configuration.
        params: its parameters, a pytree; pass it into `jax.jit`, never close over it.
        tokenizer: an `effml.data.Tokenizer`, or None if none came with it.
        chat_template: jinja text, or None.
        forward: `forward(params, tokens, **kwargs)`, `effml.nn.transformer.forward` with `config` filled in; of the
            kind "ssa" `effml.attend.ssa.forward`, which takes `mode` and `num_blocks` as well.
        bytes_on_disk: size of the weight files.
        source: the file or folder it came from.
        extra: what `save` was given as `extra`.

    Example:
        >>> LoadedModel("tiny", "dense", None, {}, None, None, lambda params, tokens: tokens, 0, "").kind
        'dense'
    """

    name: str
    kind: str
    config: Any
    params: Any
    tokenizer: Any
    chat_template: str | None
    forward: Callable[..., Any]
    bytes_on_disk: int
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    def for_decoding(self) -> LoadedModel:
        """The same model in the form that writes tokens fastest.

        The projections of a dense or SSA model are joined (`effml.nn.transformer.join_projections`) and its layers
        unrolled, which copies its kernels: let go of the one you had. Its `forward` reads them with native code where
        that can be built (`effml.nn.transformer.decoding_linear`; `effml doctor` tells). Other kinds come back
        unchanged. Saving and quantising want the separate kernels.

        Example:
            >>> model = LoadedModel("tiny", "packed", None, {}, None, None, lambda params, tokens: tokens, 0, "")
            >>> model.for_decoding() is model
            True
        """
        if self.kind not in ("dense", "ssa"):
            return self
        from effml.nn.transformer import decoding_linear, join_projections, unstack_layers

        forward = self.forward
        if "linear" not in getattr(forward, "keywords", {}):
            forward = functools.partial(forward, linear=decoding_linear)
        return dataclasses.replace(
            self, params=unstack_layers(join_projections(self.params)), forward=forward
        )


def load(model: str | os.PathLike[str], *, dtype: str | None = None) -> LoadedModel:
    """Loads a model.

    Args:
        model: a folder written by `save` (or by `effml train`), a Hugging Face folder, a .gguf file, the name
            "smollm2", or an id like "org/name" where `huggingface_hub` is installed and the network allows.
        dtype: of the parameters and the computation; None keeps what a folder of ours has, and is float32 for
            foreign models.

    Returns:
        The model with its tokenizer and forward function.

    Raises:
        ValueError: naming the nearest known name, the file that is cut short, or what is not supported.
        ImportError: with the pip line of a package that is needed and absent.

    Example:
        >>> load("smolm2")
        Traceback (most recent call last):
        ...
        ValueError: model='smolm2' is not known; did you mean 'smollm2'? (allowed: ...)
    """
    if dtype is not None:
        one_of("dtype", dtype, ["float32", "bfloat16"])
    name = os.fspath(model)
    if name == hub.SMOLLM2:
        return _foreign(hub.read_gguf(path := hub.smollm2_path(), dtype=dtype or "float32"), name, Path(path))
    path = Path(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"model={name!r} is a file, but no .gguf file; name the folder that holds the model"
            )
        return _foreign(hub.read_gguf(path, dtype=dtype or "float32"), path.stem, path)
    if path.is_dir():
        return _load_folder(path, path.absolute().name, dtype)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.is_dir():
        return _load_folder(_fetch(name), name, dtype)
    folder = path.parent
    beside = (
        [str(folder / entry.name) for entry in folder.iterdir() if _looks_like_model(entry)]
        if folder.is_dir()
        else []
    )
    one_of("model", name, [hub.SMOLLM2, *beside])
    raise ValueError(f"model={name!r} can't be read")


def _looks_like_model(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".gguf"
    return any((path / name).is_file() for name in (_META, f"model/{_META}", "config.json"))


def _load_folder(folder: Path, name: str, dtype: str | None) -> LoadedModel:
    if (folder / _META).is_file():
        return _load_own(folder, name, dtype)
    if (folder / "model" / _META).is_file():  # a training run keeps its model in a folder of its own
        return _load_own(folder / "model", name, dtype)
    if (folder / "config.json").is_file():
        return _foreign(hub.read_huggingface(folder, dtype=dtype or "float32"), name, folder)
    if (folder / "train.json").is_file():
        raise ValueError(f"{folder} is a training run that has not ended: go on with effml train --resume")
    raise ValueError(
        f"{folder} holds no model: neither {_META} (written by effml) nor config.json (Hugging Face)"
    )


def _foreign(model: hub.HubModel, name: str, path: Path) -> LoadedModel:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return LoadedModel(
        name=name,
        kind="dense",
        config=model.config,
        params=model.params,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        forward=functools.partial(forward, config=model.config),
        bytes_on_disk=sum(file.stat().st_size for file in files),
        source=str(path),
    )


def _fetch(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        purpose = f"fetch {name!r}, which is no file or folder here, from the Hugging Face Hub"
        raise missing_package("huggingface_hub", "pip install huggingface_hub", purpose) from None
    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the library and its HTTP client have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model={name!r} is no file or folder here, and the Hugging Face Hub did not give it ({reason})"
        ) from None


def _load_own(folder: Path, name: str, dtype: str | None) -> LoadedModel:
    path = folder / _META
    meta = _files.read_json(path)
    if meta.get("format") != _FORMAT:
        raise ValueError(f"{path}: format={meta.get('format')!r} is not known (this version reads {_FORMAT})")
    if not isinstance(meta.get("config"), dict):
        raise ValueError(f"{path}: config must be an object")
    if not isinstance(meta.get("extra") or {}, dict):
        raise ValueError(f"{path}: extra must be an object")
    kind = one_of(f"kind in {path}", str(meta.get("kind")), KINDS)
    model = KINDS[kind](folder, meta)
    if dtype is not None and kind in ("packed", "binary"):
        model = _with_kept_dtype(model, dtype)
    if dtype is not None and isinstance(model.config, TransformerConfig):
        dtypes: dict[str, Any] = {"param_dtype": dtype, "compute_dtype": dtype}
        config = dataclasses.replace(model.config, **dtypes)
        cast = functools.partial(jnp.asarray, dtype=dtype)
        params = jax.tree.map(
            lambda leaf: cast(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, model.params
        )
        forward_ = functools.partial(forward, config=config) if kind == "dense" else model.forward
        model = dataclasses.replace(model, config=config, params=params, forward=forward_)
    if dtype is not None and kind == "ssa":
        model = _with_ssa_dtype(model, dtype)
    return dataclasses.replace(model, name=name)


def read_tensors(folder: Path) -> tuple[dict[str, Any], int]:
    """The parameter tree in a folder written by `save`, and its size in bytes; for readers of other kinds.

    Args:
        folder: holds model.safetensors.

    Returns:
        Nested dicts (lists, where the keys count from 0) of JAX arrays in their stored types; bytes on disk.

    Raises:
        ValueError: if the file is missing, cut short or damaged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _files.write_safetensors(folder / "model.safetensors", {"layers.0.scale": np.ones(2)})
        >>> read_tensors(folder)[0]["layers"][0]["scale"].shape
        (2,)
    """
    stored = _files.SafeTensors([folder / _WEIGHTS], types=None)
    leaves = {name: jnp.asarray(stored.read(name)) for name in stored.shapes}
    return _names.unflatten(leaves), stored.byte_count


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder written by `save`, or None.

    Example:
        >>> import tempfile
        >>> read_tokenizer(Path(tempfile.mkdtemp())) is None
        True
    """
    if not (folder / _TOKENIZER).is_file():
        return None
    from effml.data import load_tokenizer

    return load_tokenizer(folder)


def _read_dense(folder: Path, meta: Mapping[str, Any]) -> LoadedModel:
    return _read_floating(folder, meta, "dense", TransformerConfig.from_dict, forward)


def _read_ssa(folder: Path, meta: Mapping[str, Any]) -> LoadedModel:
    from effml.attend import ssa

    return _read_floating(folder, meta, "ssa", ssa.SSATransformerConfig.from_dict, ssa.forward)


def _read_floating(
    folder: Path,
    meta: Mapping[str, Any],
    kind: str,
    read_config: Callable[[Mapping[str, Any]], Any],
    run: Callable[..., Any],
) -> LoadedModel:
    try:
        config = read_config(meta["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / _META}: {error}") from None
    template = meta.get("chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / _META}: chat_template must be a text or null")
    params, byte_count = read_tensors(folder)
    _check_params(str(folder / _WEIGHTS), params, config)
    return LoadedModel(
        name=folder.name,
        kind=kind,
        config=config,
        params=params,
        tokenizer=read_tokenizer(folder),
        chat_template=template,
        forward=functools.partial(run, config=config),
        bytes_on_disk=byte_count,
        source=str(folder),
        extra=dict(meta.get("extra") or {}),
    )


def _with_ssa_dtype(model: LoadedModel, dtype: str) -> LoadedModel:
    inner = dataclasses.replace(model.config.model, param_dtype=dtype, compute_dtype=dtype)
    config = dataclasses.replace(model.config, model=inner)
    return dataclasses.replace(
        model,
        config=config,
        params=jax.tree.map(functools.partial(jnp.asarray, dtype=dtype), model.params),
        forward=functools.partial(model.forward.func, config=config),  # type: ignore[attr-defined]
    )


def _read_packed(folder: Path, meta: Mapping[str, Any]) -> LoadedModel:
    from effml import quantize

    read = quantize.PackedConfig.from_dict, quantize.packed_params
    return _read_quantized(folder, meta, "packed", *read, quantize.forward)


def _read_binary(folder: Path, meta: Mapping[str, Any]) -> LoadedModel:
    from effml.quantize import nanoquant

    read = nanoquant.BinaryConfig.from_dict, nanoquant.binary_params
    return _read_quantized(folder, meta, "binary", *read, nanoquant.forward)


def _read_quantized(
    folder: Path,
    meta: Mapping[str, Any],
    kind: str,
    read_config: Callable[[Mapping[str, Any]], Any],
    read_params: Callable[[Mapping[str, Any], Any, str], Any],
    run: Callable[..., Any],
) -> LoadedModel:
    try:
        config = read_config(meta["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / _META}: {error}") from None
    template = meta.get("chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / _META}: chat_template must be a text or null")
    stored, byte_count = read_tensors(folder)
    return LoadedModel(
        name=folder.name,
        kind=kind,
        config=config,
        params=read_params(stored, config, str(folder / _WEIGHTS)),
        tokenizer=read_tokenizer(folder),
        chat_template=template,
        forward=functools.partial(run, config=config),
        bytes_on_disk=byte_count,
        source=str(folder),
        extra=dict(meta.get("extra") or {}),
    )


def _with_kept_dtype(model: LoadedModel, dtype: str) -> LoadedModel:
    """The quantised model computing in `dtype`; codes, signs and scales stay as they are."""
    inner = dataclasses.replace(model.config.model, param_dtype=dtype, compute_dtype=dtype)
    config = dataclasses.replace(model.config, model=inner, keep_dtype=dtype)
    large = (".table", ".kernel")

    def cast(path: Any, leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if path_name(path).endswith(large) else leaf

    return dataclasses.replace(
        model,
        config=config,
        params=jax.tree_util.tree_map_with_path(cast, model.params),
        forward=functools.partial(model.forward.func, config=config),  # type: ignore[attr-defined]
    )


def _check_params(source: str, params: Any, config: Any) -> None:
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, Mapping | list | tuple):
        raise ValueError(f"{source}: the parameters hold no 'layers'")
    scanned = isinstance(layers, Mapping)
    if not scanned and len(layers) != config.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.num_layers} layers, the weights hold {len(layers)}"
        )
    if isinstance(config, TransformerConfig):
        shapes = _names.parameter_shapes(config, scanned=scanned)
    else:
        from effml.attend import ssa

        made = jax.eval_shape(lambda key: ssa.init_params(key, config, scanned=scanned), jax.random.key(0))
        shapes = {name: leaf.shape for name, leaf in _leaves(made).items()}
    _names.check_tensors(
        source,
        shapes,
        {name: np.shape(leaf) for name, leaf in _leaves(params).items()},
    )
    for name, leaf in _leaves(params).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"{source}: {name} holds {jnp.result_type(leaf)}, should hold floating point numbers"
            )


def _leaves(params: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], LoadedModel]] = {
    "dense": _read_dense,
    "packed": _read_packed,
    "ssa": _read_ssa,
    "binary": _read_binary,
}
"""Who reads which kind of model folder: `reader(folder, content of effml.json) -> LoadedModel`."""


def register_kind(kind: str, reader: Callable[[Path, Mapping[str, Any]], LoadedModel]) -> None:
    """Teaches `load` and `save` another kind of model folder.

    Args:
        kind: its name, as effml.json has it.
        reader: `reader(folder, content of effml.json) -> LoadedModel`.

    Raises:
        ValueError: if the kind is taken.

    Example:
        >>> register_kind("dense", print)
        Traceback (most recent call last):
        ...
        ValueError: kind='dense' is registered already
    """
    if kind in KINDS:
        raise ValueError(f"kind={kind!r} is registered already")
    KINDS[kind] = reader


def save(
    folder: str | os.PathLike[str],
    params: Any,
    config: Any,
    tokenizer: Any = None,
    chat_template: str | None = None,
    *,
    kind: str = "dense",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model folder that `load` reads. It appears under its name when it is whole.

    Args:
        folder: a new or empty folder, or one that `save` wrote before, which is replaced.
        params: pytree of arrays; for the kind "dense" the parameters of `config`, layers stacked or not.
        config: has `to_dict()`; a `TransformerConfig` for the kind "dense", an `effml.quantize.PackedConfig` for
            "packed", an `effml.quantize.nanoquant.BinaryConfig` for "binary", an
            `effml.attend.ssa.SSATransformerConfig` for "ssa".
        tokenizer: has `save(folder)`; or None.
        chat_template: jinja text; None takes the tokenizer's own, if it has one.
        kind: who shall read it.
        extra: JSON types to keep with the model, such as how it was trained.

    Raises:
        ValueError: for an unknown kind, parameters that do not fit `config`, or a folder with other files.

    Example:
        >>> import tempfile
        >>> from effml.nn.transformer import init_params
        >>> config = TransformerConfig(vocab_size=8, width=4, num_layers=1, num_heads=2, mlp_width=6)
        >>> folder = tempfile.mkdtemp() + "/tiny"
        >>> save(folder, init_params(jax.random.key(0), config), config)
        >>> load(folder).config == config
        True
    """
    one_of("kind", kind, KINDS)
    if kind in ("dense", "ssa"):
        _check_params("params", params, config)
    if kind == "packed":
        from effml.quantize import check_packed_params

        check_packed_params("params", params, config)
    if kind == "binary":
        from effml.quantize.nanoquant import stored_tensors

        leaves = stored_tensors(params, config)
    else:
        leaves = _leaves(params)
    meta = {
        "format": _FORMAT,
        "kind": kind,
        "config": config.to_dict(),
        "chat_template": chat_template or getattr(tokenizer, "chat_template", None),
        "extra": dict(extra or {}),
    }
    with _files.new_folder(folder, _FOLDER_FILES) as path:
        _files.write_safetensors(path / _WEIGHTS, leaves)
        if tokenizer is not None:
            tokenizer.save(path)
        _files.write_json(path / _META, meta)
