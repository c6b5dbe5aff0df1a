"""OLMoE weights and configurations in Hugging Face's format: read, and write.

One table, :func:`name_map`, says which part of which parameter each stored tensor is; import and export both
follow it.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.config import ModelConfig
from moekit.mesh import data_mesh, from_shard, layout, place, shard_of
from moekit.params import param_dtype, param_shapes
from moekit.tree import check_not_hollow, held, named, nested

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# What OLMoE is, in the fields of ModelConfig.
_OLMOE: dict[str, Any] = {
    "n_dense_layers": 0,
    "d_shared": 0,
    "norm": "pre",
    "qk_norm": "full",
    "normalize_embedding": False,
    "score": "softmax",
    "route_scale": 1.0,
    "n_groups": 1,
    "top_groups": 1,
}
# ModelConfig's field for each entry of config.json that has one, and the entry's default.
_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("d_model", None),
    "num_hidden_layers": ("n_layers", None),
    "num_attention_heads": ("n_heads", None),
    "num_key_value_heads": ("n_kv_heads", None),
    "num_experts": ("n_experts", None),
    "num_experts_per_tok": ("top_k", None),
    "intermediate_size": ("d_expert", None),
    "max_position_embeddings": ("max_seq_len", 4096),
    "rms_norm_eps": ("norm_eps", 1e-5),
    "tie_word_embeddings": ("tied_head", False),
    "initializer_range": ("init_std", 0.02),
}
# Entries that would change what the model computes; moekit computes it at these values alone.
_FIXED: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "rope_scaling": None,
    "pruned_heads": {},
}
# Entries that do not change what the model computes: bookkeeping, token ids, what transformers should return.
_IGNORED = frozenset(
    "architectures _name_or_path transformers_version dtype torch_dtype use_cache return_dict problem_type "
    "bos_token_id eos_token_id pad_token_id output_attentions output_hidden_states output_router_logits "
    "router_aux_loss_coef chunk_size_feed_forward is_encoder_decoder id2label label2id".split()
)


class Piece(NamedTuple):
    """One stored tensor: ``parameter[expert][..., columns]``, transposed where ``transposed``."""

    key: str
    name: str
    expert: int | None = None
    columns: slice = slice(None)
    transposed: bool = True


def config_from_hf(source: str | PathLike | Mapping[str, Any]) -> ModelConfig:
    """Return the model that an OLMoE ``config.json`` describes.

    Weights of auxiliary losses are left at 0: ``router_aux_loss_coef`` weighs a differently scaled loss.

    Parameters
    ----------
    source : path or mapping
        A ``config.json``, the folder that holds it, or its contents.

    Returns
    -------
    ModelConfig

    Raises
    ------
    ValueError
        When there is no such file, or an entry is missing, is not known or asks for what moekit does not
        compute; the message lists all of them.

    References
    ----------
    Muennighoff et al., OLMoE, 2024. https://arxiv.org/abs/2409.02060
    """
    entries = dict(source) if isinstance(source, Mapping) else _read_json(_config_path(source))
    given = entries.pop("rope_parameters", None) or {}
    problems = [] if isinstance(given, dict) else [f"rope_parameters={given!r}, which is no dict"]
    rope = {"rope_theta": entries.pop("rope_theta", 10_000.0), **({} if problems else given)}
    problems += [
        f"{key}={entries[key]!r} where moekit's OLMoE has {value!r}"
        for key, value in _FIXED.items()
        if entries.get(key, value) != value
    ]
    if rope.pop("rope_type", "default") != "default" or set(rope) - {"rope_theta"}:
        problems.append(f"rope_parameters={rope} where moekit's OLMoE has rope_theta alone, unscaled")
    known = {*_FIELDS, *_FIXED, *_IGNORED, "norm_topk_prob", "head_dim"}
    problems += [f"{key}={entries[key]!r}, which is not known" for key in entries if key not in known]

    if entries.get("num_key_value_heads") is None:
        entries["num_key_value_heads"] = entries.get("num_attention_heads")
    fields = {field: entries.get(key, default) for key, (field, default) in _FIELDS.items()}
    typed = [(key, fields[field], ModelConfig.__annotations__[field]) for key, (field, _) in _FIELDS.items()]
    typed += [("norm_topk_prob", entries.get("norm_topk_prob", False), bool)]
    typed += [("head_dim", entries.get("head_dim") or 0, int), ("rope_theta", rope["rope_theta"], float)]
    problems += [
        f"{key}={value!r}, which is no {kind.__name__}"
        for key, value, kind in typed
        if type(value) is not kind and not (kind is float and type(value) is int)
    ]
    if not problems:
        d_model, n_heads = fields["d_model"], fields["n_heads"]
        fields["d_head"] = entries.get("head_dim") or d_model // max(n_heads, 1)
        if fields["d_head"] * n_heads != d_model:
            problems.append(f"hidden_size={d_model} that is not num_attention_heads={n_heads} times head_dim")
    if problems:
        raise ValueError("config_from_hf needs an OLMoE configuration, got " + "; ".join(problems))
    normalize = "l1" if entries.get("norm_topk_prob", False) else "none"
    return ModelConfig(**fields, **_OLMOE, normalize=normalize, rope_base=float(rope["rope_theta"]))


def config_to_hf(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of an OLMoE.

    Parameters
    ----------
    config : ModelConfig
        A model of OLMoE's form; the weights of its auxiliary losses are not written.
    dtype : torch.dtype
        In which transformers should load it when asked for ``dtype="auto"``.

    Returns
    -------
    dict
        Token ids are ``None``: the tokenizer knows them, the model does not.

    Raises
    ------
    ValueError
        When the model has parts that OLMoE has not; the message lists them.
    """
    _check_form("config_to_hf", config)
    rope = {"rope_theta": config.rope_base, "rope_type": "default"}
    return {
        "architectures": ["OlmoeForCausalLM"],
        **{key: value for key, value in _FIXED.items() if key not in ("rope_scaling", "pruned_heads")},
        **{key: getattr(config, field) for key, (field, _) in _FIELDS.items()},
        "norm_topk_prob": config.normalize == "l1",
        "rope_parameters": rope,
        "rope_theta": config.rope_base,  # where transformers 4 looks
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def name_map(config: ModelConfig, *, fused: bool = False) -> list[Piece]:
    """Return what each tensor of an OLMoE checkpoint is, every parameter covered exactly once.

    Parameters
    ----------
    config : ModelConfig
        A model of OLMoE's form.
    fused : bool
        Experts of a layer in two tensors, as transformers 5 holds them in memory; otherwise three matrices
        per expert, as the public checkpoints have them.

    Returns
    -------
    list of Piece

    Raises
    ------
    ValueError
        When the model has parts that OLMoE has not.
    """
    _check_form("name_map", config)
    q, kv, h = config.n_heads * config.d_head, config.n_kv_heads * config.d_head, config.d_expert
    pieces = [Piece("model.embed_tokens.weight", "embedding", transposed=False)]
    for i in range(config.n_layers):
        there, here = f"model.layers.{i}.", f"layers.{i}."
        qkv, experts, held = here + "attention.qkv", there + "mlp.experts.", here + "moe.experts."
        pieces += [
            Piece(there + "input_layernorm.weight", here + "attention_norm_in", transposed=False),
            Piece(there + "self_attn.q_proj.weight", qkv, columns=slice(0, q)),
            Piece(there + "self_attn.k_proj.weight", qkv, columns=slice(q, q + kv)),
            Piece(there + "self_attn.v_proj.weight", qkv, columns=slice(q + kv, q + 2 * kv)),
            Piece(there + "self_attn.q_norm.weight", here + "attention.q_norm", transposed=False),
            Piece(there + "self_attn.k_norm.weight", here + "attention.k_norm", transposed=False),
            Piece(there + "self_attn.o_proj.weight", here + "attention.out"),
            Piece(there + "post_attention_layernorm.weight", here + "ffn_norm_in", transposed=False),
            Piece(there + "mlp.gate.weight", here + "moe.router"),
        ]
        if fused:
            pieces.append(Piece(experts + "gate_up_proj", held + "gate_up"))
            pieces.append(Piece(experts + "down_proj", held + "down"))
            continue
        for e in range(config.n_experts):
            pieces += [
                Piece(f"{experts}{e}.gate_proj.weight", held + "gate_up", e, slice(0, h)),
                Piece(f"{experts}{e}.up_proj.weight", held + "gate_up", e, slice(h, 2 * h)),
                Piece(f"{experts}{e}.down_proj.weight", held + "down", e),
            ]
    pieces.append(Piece("model.norm.weight", "norm", transposed=False))
    if not config.tied_head:
        pieces.append(Piece("lm_head.weight", "head"))
    return pieces


def import_olmoe(
    folder: str | PathLike,
    *,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    mesh: DeviceMesh | None = None,
) -> TensorDict:
    """Read the parameters of an OLMoE from the safetensors that ``save_pretrained`` writes.

    Besides the result one tensor is in memory at a time, and of the experts only those that this rank holds
    are read. No communication: every rank reads the folder itself.

    Parameters
    ----------
    folder : path
        Holds ``config.json``, and ``model.safetensors`` or ``model.safetensors.index.json`` with the files
        that it names; experts one by one or fused.
    config : ModelConfig
        From :func:`config_from_hf`; weights of auxiliary losses, ``init_std`` and ``max_seq_len`` may differ.
    dtype : torch.dtype, optional
        Of every parameter but the routers, which are float32 at least; by default each as it is stored.
    device : str or torch.device, optional
        By default the device of ``mesh``, else the CPU.
    mesh : DeviceMesh, optional
        Axes (edp, ep).

    Returns
    -------
    TensorDict
        Like that of :func:`moekit.init_params`.

    Raises
    ------
    ValueError
        When ``dtype`` is not a float one, a file is missing or damaged, ``config.json`` describes another
        model, or tensors are missing, unused, of another shape or not of a float dtype; the message lists
        them all, before any is read.
    """
    _check_dtype("import_olmoe", dtype)
    folder = Path(folder)
    _check_same_model(config, config_from_hf(folder))
    device = torch.device(device or (mesh.device_type if mesh is not None else "cpu"))
    shapes = param_shapes(config)
    params = {}
    with ExitStack() as stack:
        files = _open_all(folder, stack)
        stored = {key: file.get_slice(key) for key, file in files.items()}
        pieces = name_map(config, fused=any(key.endswith("mlp.experts.gate_up_proj") for key in stored))
        _compare(
            f"import_olmoe needs {folder} to hold exactly the tensors of this model, in a float dtype",
            {p.key: tuple(_part(p, torch.empty(shapes[p.name], device="meta")).shape) for p in pieces},
            {key: tuple(tensor.get_shape()) for key, tensor in stored.items()},
            [f"{key} of {t.get_dtype()}" for key, t in stored.items() if t.get_dtype() not in _DTYPES],
        )
        for name, shape in shapes.items():
            mine = [piece for piece in pieces if piece.name == name]
            held, offset = shard_of(name, shape, mesh)
            as_stored = [_DTYPES[stored[piece.key].get_dtype()] for piece in mine]
            values = torch.empty(
                held, dtype=param_dtype(name, dtype or reduce(torch.promote_types, as_stored)), device=device
            )
            first, end = offset[0], offset[0] + held[0]
            for piece in mine:
                if piece.expert is None:
                    _part(piece, values).copy_(
                        stored[piece.key][first:end] if len(shape) == 3 else stored[piece.key][:]
                    )
                elif first <= piece.expert < end:
                    _part(piece, values, first).copy_(stored[piece.key][:])
            params[name] = from_shard(name, values, shape, mesh)
    return nested(params)


def export_olmoe(
    params: TensorDict,
    folder: str | PathLike,
    *,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    mesh: DeviceMesh | None = None,
) -> None:
    """Write parameters as an OLMoE that transformers reads: ``config.json`` and safetensors.

    All is written to a hidden folder beside ``folder``, which is renamed when complete: a process that is
    killed before leaves no ``folder``. Collective over ``mesh``, without gathering any parameter: each rank
    of the first ``ep`` group writes files with its own experts, the first of them the rest too. What fails
    on one rank is raised on all.

    Parameters
    ----------
    params : TensorDict
        Plain without ``mesh``; on a mesh DTensors, placed as :func:`moekit.init_params` places them.
    folder : path
        Must not exist yet; on a file system that all writing ranks share.
    config : ModelConfig
        A model of OLMoE's form.
    dtype : torch.dtype, optional
        Of every tensor written; by default each as it is held (routers of a bfloat16 model are float32).
    max_shard_bytes : int
        Most bytes of tensors in one file, unless one tensor alone has more.
    mesh : DeviceMesh, optional
        Axes (edp, ep).

    Raises
    ------
    ValueError
        When the model is not of OLMoE's form, ``folder`` exists or another export is writing it, ``dtype`` is
        not a float one, or parameters are missing, unused, or of another shape or placement than the model's;
        the message lists them all, before anything is written.
    OSError
        When writing fails; what had been written is removed.
    """
    _check_dtype("export_olmoe", dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"export_olmoe needs max_shard_bytes >= 1, got {max_shard_bytes}")
    pieces = name_map(config)
    leaves = named(params)
    _compare(
        "export_olmoe needs exactly the parameters of this model, "
        + ("plain tensors without a mesh" if mesh is None else "placed as init_params does on this mesh"),
        param_shapes(config),
        {name: tuple(leaf.shape) for name, leaf in leaves.items()},
        _misplaced(leaves, mesh),
    )
    check_not_hollow("export_olmoe", **leaves)
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial")
    on = None if mesh is None else mesh["edp", "ep"]
    ep, here = (1, (0, 0)) if on is None else (on.size(1), tuple(on.get_coordinate() or ()))
    files = _plan(pieces, leaves, config.n_experts // ep, dtype, max_shard_bytes)

    def start() -> None:
        if target.exists():
            raise ValueError(f"export_olmoe needs a new folder, got {target}, which exists; remove it first")
        if here == (0, 0):
            with suppress(FileNotFoundError):
                undo.callback(os.close, _lock(partial))
                shutil.rmtree(partial)  # of an export that was killed
            partial.mkdir(parents=True)
            undo.callback(os.close, _lock(partial))
            undo.callback(shutil.rmtree, partial, ignore_errors=True)  # before others can lock it

    def write() -> None:
        for file in files:
            if here == (0, file.writer):
                first = file.writer * (config.n_experts // ep)
                tensors = {p.key: _stored(p, leaves[p.name], first, dtype) for p in file.pieces}
                try:
                    save_file(tensors, partial / file.name, metadata={"format": "pt"})
                except SafetensorError as error:
                    raise OSError(f"export_olmoe could not write {partial / file.name}: {error}") from error
        if here == (0, 0):
            _write_json(
                partial / "config.json", config_to_hf(config, dtype=dtype or leaves["embedding"].dtype)
            )
            if len(files) > 1:
                where = {piece.key: file.name for file in files for piece in file.pieces}
                size = sum(file.n_bytes for file in files)
                _write_json(partial / _INDEX, {"metadata": {"total_size": size}, "weight_map": where})

    def finish() -> None:
        if here == (0, 0):
            if absent := [file.name for file in files if not (partial / file.name).exists()]:
                raise OSError(f"export_olmoe needs one file system for all ranks, {partial} lacks {absent}")
            partial.rename(target)

    with ExitStack() as undo:
        for act in (start, write, finish):
            _on_all_ranks(act, mesh)


def _lock(partial: Path) -> int:
    """Return an open folder of an export that is not complete; raise where a living process holds it."""
    folder = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise ValueError(
            f"export_olmoe needs a folder of its own, but another export writes {partial}; wait for it, or "
            "choose another folder"
        ) from error
    except OSError:
        pass  # a file system without locks
    return folder


class _File(NamedTuple):
    name: str
    writer: int  # coordinate on the ep axis
    pieces: list[Piece]
    n_bytes: int


def _plan(
    pieces: list[Piece], leaves: Mapping[str, Tensor], n_held: int, dtype: torch.dtype | None, most: int
) -> list[_File]:
    """Divide the stored tensors into files that one rank can write, where each holds ``n_held`` experts."""
    files: list[_File] = []
    for writer in range(max((p.expert or 0) // n_held for p in pieces) + 1):
        into, size = [], 0
        for piece in pieces:
            if (piece.expert or 0) // n_held != writer:
                continue
            leaf = leaves[piece.name]
            n_bytes = _part(piece, torch.empty(leaf.shape, dtype=dtype or leaf.dtype, device="meta")).nbytes
            if into and size + n_bytes > most:
                files.append(_File("", writer, into, size))
                into, size = [], 0
            into.append(piece)
            size += n_bytes
        files.append(_File("", writer, into, size))
    if len(files) == 1:
        return [files[0]._replace(name=_SINGLE)]
    return [
        file._replace(name=f"model-{i:05d}-of-{len(files):05d}.safetensors")
        for i, file in enumerate(files, 1)
    ]


def _stored(piece: Piece, leaf: Tensor, first: int, dtype: torch.dtype | None) -> Tensor:
    return _part(piece, held(leaf).detach(), first).to("cpu", dtype or leaf.dtype).contiguous()


def _part(piece: Piece, held: Tensor, first: int = 0) -> Tensor:
    """Return the stored tensor as a view of a parameter that is held from expert ``first`` on."""
    part = held if piece.expert is None else held[piece.expert - first]
    part = part[..., piece.columns]
    return part.mT if piece.transposed else part


def _config_path(source: str | PathLike) -> Path:
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"moekit.hf needs a readable JSON file {path}, got {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"moekit.hf needs a JSON object in {path}, got a {type(entries).__name__}")
    return entries


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n")


def _open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the opened file of every stored tensor."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() == index.exists():
        raise ValueError(
            f"import_olmoe needs one of {_SINGLE} and {_INDEX} in {folder}, got "
            f"{'both' if single.exists() else 'neither'}"
        )
    weight_map = _read_json(index).get("weight_map", {}) if index.exists() else None
    if weight_map is not None and not (
        isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ValueError(f"import_olmoe needs the name of a file for each tensor of {index}, got others")
    stored: dict[str, Any] = {}
    for name in [_SINGLE] if weight_map is None else sorted(set(weight_map.values())):
        try:
            file = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"import_olmoe needs a complete {folder / name}, got {error}") from error
        keys = set(file.keys())
        if weight_map is not None and keys != (listed := {k for k, v in weight_map.items() if v == name}):
            raise ValueError(
                f"import_olmoe needs {index} to list exactly what {name} holds, "
                f"got a difference in {', '.join(sorted(listed ^ keys))}"
            )
        stored |= dict.fromkeys(keys, file)
    return stored


def _compare(
    need: str, wanted: Mapping[str, tuple], got: Mapping[str, tuple], problems: Iterable[str] = ()
) -> None:
    problems = list(problems)
    for what, keys in (("missing", set(wanted) - set(got)), ("unused", set(got) - set(wanted))):
        problems += [f"{what} {', '.join(sorted(keys))}"] if keys else []
    problems += [
        f"{key} of shape {got[key]} not {shape}"
        for key, shape in wanted.items()
        if got.get(key, shape) != shape
    ]
    if problems:
        raise ValueError(f"{need}, got {'; '.join(problems)}")


def _check_dtype(who: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _DTYPES.values():
        raise ValueError(f"{who} needs dtype in {[str(d) for d in _DTYPES.values()]} or None, got {dtype}")


def _check_form(who: str, config: ModelConfig) -> None:
    wrong = [f"{k}={getattr(config, k)!r} not {v!r}" for k, v in _OLMOE.items() if getattr(config, k) != v]
    if config.n_heads * config.d_head != config.d_model:
        wrong.append(f"n_heads * d_head = {config.n_heads * config.d_head} not d_model = {config.d_model}")
    if wrong:
        raise ValueError(f"{who} needs a model of OLMoE's form, got " + ", ".join(wrong))


def _check_same_model(config: ModelConfig, stored: ModelConfig) -> None:
    fields = {*_OLMOE, "d_head", "normalize", "rope_base", *(field for field, _ in _FIELDS.values())}
    wrong = [
        f"{field}={getattr(config, field)!r} not {getattr(stored, field)!r}"
        for field in sorted(fields - {"max_seq_len", "init_std"})
        if getattr(config, field) != getattr(stored, field)
    ]
    if wrong:
        raise ValueError(
            f"import_olmoe needs the model that config.json describes, got {', '.join(wrong)}; "
            "import with config_from_hf(folder), and change the configuration after"
        )


def _misplaced(leaves: Mapping[str, Tensor], mesh: DeviceMesh | None) -> list[str]:
    wrong = []
    for name, leaf in leaves.items():
        want = None if mesh is None else layout(name, mesh)
        if (got := place(leaf)) != want:
            wrong.append(f"{name} as {'a plain tensor' if got is None else got[1]}")
    return wrong


def _on_all_ranks(act: Callable[[], None], mesh: DeviceMesh | None) -> None:
    """Run ``act``; on a mesh, raise on every rank what it raised on any."""
    if mesh is None:
        return act()
    failure = None
    try:
        act()
    except Exception as error:
        known = isinstance(error, ValueError | OSError)
        failure = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    failures: list[Exception | None] = [None] * data_mesh(mesh).size()
    dist.all_gather_object(failures, failure, group=data_mesh(mesh).get_group())
    for found in failures:
        if found is not None:
            raise found
