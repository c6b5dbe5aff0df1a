"""OLMoE through transformers: the same logits and gradients after import, the same bits after export."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import moekit as mk
from moekit import hf
from moekit.model import logits
from moekit.params import param_shapes
from moekit.testing import ranks
from moekit.tree import map_named

transformers = pytest.importorskip("transformers", reason="transformers is not installed (moekit[dev])")


def make_olmoe(**changes):
    """A random tiny OLMoE; with the default initializer_range of 0.02 its experts would hardly matter."""
    sizes = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000.0},
        initializer_range=0.3,
        pad_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**(sizes | changes)))
    with torch.no_grad():  # gains of one would hide a norm left out
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def olmoe():
    return make_olmoe()


@pytest.fixture(scope="module")
def folder(olmoe, tmp_path_factory):
    """What save_pretrained writes: one file, an expert at a time. Read only."""
    path = tmp_path_factory.mktemp("hf") / "olmoe"
    olmoe.save_pretrained(path)
    return path


@pytest.fixture
def own_folder(folder, tmp_path):
    """A copy of ``folder`` to spoil."""
    return shutil.copytree(folder, tmp_path / "own")


def tokens(b=3, s=17):
    return torch.randint(0, 61, (b, s), generator=torch.Generator().manual_seed(2))


def everything(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(got, want):
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key


def flat(params):
    leaves = {}
    map_named(leaves.__setitem__, params)
    return leaves


VARIANTS = {
    "as published": {},
    "one key head per query head": {"num_key_value_heads": 4},
    "scores normalised": {"norm_topk_prob": True},
    "tied head": {"tie_word_embeddings": True},
    "another epsilon": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, tmp_path):
    model = make_olmoe(**VARIANTS[variant])
    model.save_pretrained(tmp_path / "m")
    config = hf.config_from_hf(tmp_path / "m")
    params = hf.import_olmoe(tmp_path / "m", config=config)
    ids = tokens()

    want = model(ids, labels=ids)
    got = logits(params, ids, config=config)
    torch.testing.assert_close(got, want.logits, rtol=0, atol=1e-4)

    want.loss.backward()
    batch = mk.count_tokens(mk.batch.make_batch(ids, torch.zeros_like(ids), torch.arange(len(ids))))
    (loss, _), grads = mk.value_and_grad(mk.next_token_loss, has_aux=True)(params, batch, config=config)
    torch.testing.assert_close(loss, want.loss.detach(), rtol=1e-5, atol=0)
    leaves, theirs = flat(grads), dict(model.named_parameters())
    pieces = hf.name_map(config, fused=True)
    assert {piece.key for piece in pieces} == theirs.keys()
    for piece in pieces:
        grad = theirs[piece.key].grad
        error = torch.linalg.vector_norm(hf._part(piece, leaves[piece.name]) - grad)
        size = torch.linalg.vector_norm(grad)
        assert size > 1e-2 and error < 1e-4 * size, f"{piece.key}: error {error:.1e} in {size:.1e}"


def test_what_was_imported_comes_back_bit_for_bit(folder, tmp_path):
    config = hf.config_from_hf(folder)
    hf.export_olmoe(hf.import_olmoe(folder, config=config), tmp_path / "back", config=config)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert hf.config_from_hf(tmp_path / "back") == config
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_a_bfloat16_checkpoint_comes_back_bit_for_bit(olmoe, tmp_path):
    make_olmoe().to(torch.bfloat16).save_pretrained(tmp_path / "m")
    config = hf.config_from_hf(tmp_path / "m")
    params = hf.import_olmoe(tmp_path / "m", config=config)
    assert {leaf.dtype for name, leaf in flat(params).items() if "router" not in name} == {torch.bfloat16}
    assert params["layers", "0", "moe", "router"].dtype == torch.float32
    hf.export_olmoe(params, tmp_path / "back", config=config, dtype=torch.bfloat16)
    assert_same_tensors(everything(tmp_path / "back"), everything(tmp_path / "m"))
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


def test_several_files_hold_what_one_file_holds(olmoe, folder, tmp_path):
    olmoe.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    config = hf.config_from_hf(tmp_path / "m")
    params = hf.import_olmoe(tmp_path / "m", config=config)
    hf.export_olmoe(params, tmp_path / "back", config=config, max_shard_bytes=20_000)
    assert_same_tensors(everything(tmp_path / "back"), everything(folder))
    for file in (tmp_path / "back").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 20_000
    again = hf.import_olmoe(tmp_path / "back", config=config)
    assert_same_tensors(flat(again), flat(params))


def test_fused_experts_are_read_too(olmoe, folder, tmp_path):
    olmoe.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in everything(tmp_path / "fused")
    config = hf.config_from_hf(folder)
    fused = hf.import_olmoe(tmp_path / "fused", config=config)
    assert_same_tensors(flat(fused), flat(hf.import_olmoe(folder, config=config)))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_moekit_writes(tied, tmp_path):
    config = mk.ModelConfig(
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_head=8,
        n_experts=8,
        top_k=3,
        d_expert=24,
        max_seq_len=64,
        rope_base=5e3,
        norm="pre",
        norm_eps=1e-3,
        qk_norm="full",
        normalize="l1",
        tied_head=tied,
        init_std=0.3,
    )
    params = mk.init_params(config, seed=3)
    hf.export_olmoe(params, tmp_path / "m", config=config, max_shard_bytes=30_000)
    model, report = transformers.OlmoeForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(report.values()), report
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, logits(params, ids, config=config), rtol=0, atol=1e-4)
    assert hf.config_from_hf(tmp_path / "m") == config


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_name_map_is_a_bijection(fused, tied, folder):
    config = dataclasses.replace(hf.config_from_hf(folder), tied_head=tied)
    pieces = hf.name_map(config, fused=fused)
    assert len({piece.key for piece in pieces}) == len(pieces)
    covered = {name: torch.zeros(shape) for name, shape in param_shapes(config).items()}
    for piece in pieces:
        hf._part(piece, covered[piece.name]).add_(1)
    assert all((times == 1).all() for times in covered.values())


def test_configurations_are_read_as_transformers_4_and_5_write_them():
    entries = make_olmoe(norm_topk_prob=True).config.to_dict()
    config = hf.config_from_hf(entries)
    assert (config.normalize, config.rope_base, config.norm, config.qk_norm) == ("l1", 5_000.0, "pre", "full")
    entries |= {"rope_theta": entries.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    entries |= {"torch_dtype": entries.pop("dtype")}
    assert hf.config_from_hf(entries) == config


def test_a_configuration_survives_the_way_there_and_back(folder):
    config = hf.config_from_hf(folder)
    assert hf.config_from_hf(hf.config_to_hf(config)) == config


@pytest.mark.parametrize(
    "change",
    [
        {"clip_qkv": 8.0},
        {"attention_bias": True},
        {"attention_dropout": 0.1},
        {"hidden_act": "gelu"},
        {"model_type": "mixtral"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"head_dim": 16},
        {"num_experts": None},
        {"num_hidden_layers": "2"},
        {"num_experts": 4.0},
        {"num_experts_per_tok": True},
        {"head_dim": "16"},
        {"norm_topk_prob": "false"},
        {"tie_word_embeddings": 1},
        {"rope_theta": "1e4", "rope_parameters": None},
        {"rope_parameters": [1e4]},
        {"quantization_config": {"bits": 8}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_moekit_does_not_compute_is_refused(change, olmoe):
    with pytest.raises(ValueError, match=f"config_from_hf needs .*{next(iter(change))}"):
        hf.config_from_hf(olmoe.config.to_dict() | change)


def test_every_reason_to_refuse_a_configuration_is_named(olmoe):
    with pytest.raises(ValueError, match=r"attention_bias=True.*clip_qkv=1\.0"):
        hf.config_from_hf(olmoe.config.to_dict() | {"clip_qkv": 1.0, "attention_bias": True})


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "peri"},
        {"qk_norm": "head"},
        {"d_shared": 8},
        {"n_dense_layers": 1, "d_dense": 8},
        {"score": "sigmoid"},
        {"route_scale": 2.0},
        {"n_groups": 2},
        {"normalize_embedding": True},
        {"d_head": 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_is_no_olmoe_is_not_written(change, folder, tmp_path):
    config = dataclasses.replace(hf.config_from_hf(folder), **change)
    with pytest.raises(ValueError, match=f"needs a model of OLMoE's form, got .*{next(iter(change))}"):
        hf.config_to_hf(config)
    with pytest.raises(ValueError, match="needs a model of OLMoE's form"):
        hf.export_olmoe(mk.init_params(config), tmp_path / "m", config=config)
    assert not list(tmp_path.iterdir())


def test_missing_unused_and_misshapen_tensors_are_listed_together(own_folder):
    config = hf.config_from_hf(own_folder)
    tensors = load_file(own_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(32)
    tensors["model.layers.0.mlp.gate.weight"] = torch.ones(7, 32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, own_folder / "model.safetensors")
    with pytest.raises(ValueError, match="import_olmoe needs") as error:
        hf.import_olmoe(own_folder, config=config)
    for part in (
        "missing model.layers.1.mlp.experts.7.up_proj.weight, model.norm.weight",
        "unused model.layers.2.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight of shape (7, 32) not (8, 32)",
        "lm_head.weight of I8",
    ):
        assert part in str(error.value)


def test_a_truncated_file_is_an_error(own_folder):
    file = own_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"needs a complete .*model\.safetensors"):
        hf.import_olmoe(own_folder, config=hf.config_from_hf(own_folder))


def test_a_missing_file_is_an_error(olmoe, tmp_path):
    with pytest.raises(ValueError, match=r"needs a readable JSON file .*config\.json"):
        hf.config_from_hf(tmp_path)
    olmoe.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    config = hf.config_from_hf(tmp_path / "m")
    next((tmp_path / "m").glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"needs a complete .*model-00002-of"):
        hf.import_olmoe(tmp_path / "m", config=config)
    (tmp_path / "m/model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="got neither"):
        hf.import_olmoe(tmp_path / "m", config=config)


def test_an_index_that_lists_other_tensors_than_its_files_hold_is_an_error(olmoe, tmp_path):
    olmoe.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    path = tmp_path / "m/model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a difference in model\.norm\.weight"):
        hf.import_olmoe(tmp_path / "m", config=hf.config_from_hf(tmp_path / "m"))
    for damaged in ([1], index["weight_map"] | {"lm_head.weight": 5}):
        path.write_text(json.dumps({"weight_map": damaged}))
        with pytest.raises(ValueError, match=r"needs the name of a file for each tensor of .*index"):
            hf.import_olmoe(tmp_path / "m", config=hf.config_from_hf(tmp_path / "m"))


@pytest.mark.parametrize(
    "change", [{"normalize": "l1"}, {"top_k": 2}, {"rope_base": 1e4}, {"n_heads": 8, "d_head": 4}]
)
def test_importing_as_another_model_is_refused_even_where_the_shapes_fit(change, folder):
    config = dataclasses.replace(hf.config_from_hf(folder), **change)
    with pytest.raises(
        ValueError, match=f"needs the model that config.json describes, got .*{next(iter(change))}"
    ):
        hf.import_olmoe(folder, config=config)


def test_the_objective_may_differ_from_the_stored_configuration(folder):
    config = hf.config_from_hf(folder)
    changed = dataclasses.replace(
        config, balance_weight=0.1, router_z_weight=0.1, max_seq_len=8, init_std=1.0
    )
    assert_same_tensors(
        flat(hf.import_olmoe(folder, config=changed)), flat(hf.import_olmoe(folder, config=config))
    )


def test_wrong_parameters_are_listed_before_anything_is_written(folder, tmp_path):
    config = hf.config_from_hf(folder)
    params = hf.import_olmoe(folder, config=config)
    del params["norm"]
    params["layers", "0", "extra"] = torch.ones(2)
    params["head"] = torch.ones(61, 32)
    with pytest.raises(ValueError, match="export_olmoe needs") as error:
        hf.export_olmoe(params, tmp_path / "m", config=config)
    for part in ("missing norm", "unused layers.0.extra", "head of shape (61, 32) not (32, 61)"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"export_olmoe needs dtype in .*, got torch\.float8_e4m3fn"):
        hf.export_olmoe(params, tmp_path / "m", config=config, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"import_olmoe needs dtype in .*, got torch\.int32"):
        hf.import_olmoe(folder, config=config, dtype=torch.int32)
    with pytest.raises(ValueError, match="max_shard_bytes >= 1, got 0"):
        hf.export_olmoe(params, tmp_path / "m", config=config, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_as_it_is(folder, own_folder):
    config = hf.config_from_hf(folder)
    before = {path.name: path.read_bytes() for path in own_folder.iterdir()}
    with pytest.raises(ValueError, match="needs a new folder"):
        hf.export_olmoe(hf.import_olmoe(folder, config=config), own_folder, config=config)
    assert {path.name: path.read_bytes() for path in own_folder.iterdir()} == before


def test_an_export_that_fails_half_way_leaves_nothing(folder, tmp_path, monkeypatch):
    config = hf.config_from_hf(folder)
    written = []

    def full_disk(tensors, path, metadata):
        if written:
            raise OSError("no space left")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        hf.export_olmoe(
            hf.import_olmoe(folder, config=config), tmp_path / "m", config=config, max_shard_bytes=20_000
        )
    assert written and not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_replaced(folder, tmp_path):
    config = hf.config_from_hf(folder)
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial/model-00009-of-00009.safetensors").write_bytes(b"half")
    hf.export_olmoe(hf.import_olmoe(folder, config=config), tmp_path / "m", config=config)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"config.json", "model.safetensors"}


def test_what_another_export_is_writing_is_left_alone(folder, tmp_path, monkeypatch):
    config = hf.config_from_hf(folder)
    params = hf.import_olmoe(folder, config=config)
    save, others = hf.save_file, []

    def save_beside_another(tensors, path, **options):
        if not others:
            others.append(path)
            with pytest.raises(ValueError, match=r"another export writes .*/\.m\.partial; wait for it"):
                hf.export_olmoe(params, tmp_path / "m", config=config)
        save(tensors, path, **options)

    monkeypatch.setattr(hf, "save_file", save_beside_another)
    hf.export_olmoe(params, tmp_path / "m", config=config)
    assert others and [path.name for path in tmp_path.iterdir()] == ["m"]


class Recorded:
    """An open safetensors file that notes which tensors, and how much of them, were read."""

    def __init__(self, *args, **options):
        self.file = safe_open(*args, **options)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, key):
        return RecordedSlice(key, self.file.get_slice(key))


class RecordedSlice:
    read: dict = {}  # noqa: RUF012

    def __init__(self, key, tensor):
        self.key, self.tensor = key, tensor
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index):
        values = self.tensor[index]
        assert self.key not in self.read, "read twice"
        self.read[self.key] = tuple(values.shape)
        return values


def import_on_a_rank(folder, edp, ep, back):
    """Import on a mesh and export again; return what was read, and the logits."""
    mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
    config = hf.config_from_hf(folder)
    RecordedSlice.read.clear()
    plain, hf.safe_open = hf.safe_open, Recorded
    try:
        params = hf.import_olmoe(folder, config=config, mesh=mesh)
    finally:
        hf.safe_open = plain
    hf.export_olmoe(params, back, config=config, mesh=mesh, max_shard_bytes=40_000)
    assert all(isinstance(leaf, DTensor) for leaf in flat(params).values())
    return dict(RecordedSlice.read), logits(params, tokens(), config=config, mesh=mesh)


@pytest.mark.parametrize(("edp", "ep"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_read_and_write_their_own_experts_alone(edp, ep, fused, olmoe, folder, tmp_path):
    source = folder
    if fused:
        olmoe.save_pretrained(source := tmp_path / "fused", save_original_format=False)
    config = hf.config_from_hf(folder)
    answers = ranks(edp * ep)(import_on_a_rank, source, edp, ep, tmp_path / "back")
    for rank, (read, got) in enumerate(answers):
        first = rank % ep * (8 // ep)
        if fused:
            assert read["model.layers.1.mlp.experts.gate_up_proj"] == (8 // ep, 48, 32)
        else:
            experts = {int(key.split(".")[5]) for key in read if ".experts." in key}
            assert experts == set(range(first, first + 8 // ep))
        torch.testing.assert_close(got, olmoe(tokens()).logits, rtol=0, atol=1e-4)
    assert_same_tensors(everything(tmp_path / "back"), everything(folder))
    assert_same_tensors(
        flat(hf.import_olmoe(tmp_path / "back", config=config)), flat(hf.import_olmoe(folder, config=config))
    )


def fail_on_one_rank(folder, target):
    mesh = mk.make_mesh(edp=1, ep=2, device="cpu")
    config = hf.config_from_hf(folder)
    params = hf.import_olmoe(folder, config=config, mesh=mesh)
    plain = hf.save_file
    if torch.distributed.get_rank() == 1:

        def full_disk(*args, **options):
            raise OSError("no space left")

        hf.save_file = full_disk
    try:
        hf.export_olmoe(params, target, config=config, mesh=mesh)
    except OSError as error:
        return str(error)
    finally:
        hf.save_file = plain


def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(folder, tmp_path):
    assert ranks(2)(fail_on_one_rank, folder, tmp_path / "m") == ["no space left"] * 2
    assert not list(tmp_path.iterdir())


def wrong_placements(folder, target):
    mesh = mk.make_mesh(edp=1, ep=2, device="cpu")
    config = hf.config_from_hf(folder)
    on_mesh, plain = hf.import_olmoe(folder, config=config, mesh=mesh), hf.import_olmoe(folder, config=config)
    messages = []
    for params, over in ((plain, mesh), (on_mesh, None)):
        with pytest.raises(ValueError, match="export_olmoe needs") as error:
            hf.export_olmoe(params, target, config=config, mesh=over)
        messages.append(str(error.value))
    return messages


def test_parameters_of_another_mesh_are_refused(folder, tmp_path):
    for plain_on_mesh, mesh_without in ranks(2)(wrong_placements, folder, tmp_path / "m"):
        assert "placed as init_params does on this mesh" in plain_on_mesh
        assert "norm as a plain tensor" in plain_on_mesh
        assert "plain tensors without a mesh" in mesh_without and "norm as (Replicate(),)" in mesh_without
    assert not list(tmp_path.iterdir())
