from dataclasses import replace
from functools import partial

import pytest
import reference
import torch
from hypothesis import given, strategies as st
from reference import close, draw, flat, named_grads, packed_batch, refuses, small_config, with_grads

import moekit as mk
from moekit import model
from moekit.kernels.qk_norm_rope import rotate
from moekit.tree import map_named

HEADS = dict(n_heads=4, n_kv_heads=2)
VARIANTS = {
    "pre": dict(),
    "post, embedding normalised, shared expert, scaled weights": dict(
        norm="post", normalize_embedding=True, route_scale=4.0
    ),
    "peri, no shared expert, no query and key norm": dict(norm="peri", d_shared=0, qk_norm="none"),
    "tied head, full-width query and key norm, one kv head": dict(
        tied_head=True, qk_norm="full", n_kv_heads=1
    ),
    "all dense": dict(n_dense_layers=2),
    "sigmoid, groups, unnormalised, all experts": dict(
        n_dense_layers=0, score="sigmoid", normalize="none", n_groups=3, top_groups=2
    ),
}
EACH_VARIANT = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
WEIGHTS = dict(balance_weight=0.3, router_z_weight=0.2, head_z_weight=0.1)


def params_of(config, dtype=torch.float64, seed=0):
    """Return parameters whose norm gains are not one."""
    params = mk.init_params(config, seed=seed, dtype=dtype)
    return params.apply(lambda p: p + 0.3 * draw(*p.shape, seed=len(p), dtype=p.dtype) if p.ndim == 1 else p)


def rope(s, config, dtype=torch.float64):
    return model.rope_table(s, config=config, like=torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("documents", [None, packed_batch(2, 6).documents], ids=["one document", "packed"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_a_loop_over_heads(documents, qk_norm, n_kv_heads):
    config = small_config(n_kv_heads=n_kv_heads, qk_norm=qk_norm)
    params = params_of(config)["layers"]["0"]["attention"]
    heads = dict(n_heads=4, n_kv_heads=n_kv_heads)
    mask = None if documents is None else model.document_mask(documents, dtype=torch.float64)
    names = list(params.keys())
    leaves = [*params.values(), draw(2, 6, 8)]

    def ours(*values):
        named = dict(zip(names, values[:-1], strict=True))
        return model.attention(named, values[-1], rope=rope(6, config), mask=mask, **heads)

    def plain(*values):
        named = dict(zip(names, values[:-1], strict=True))
        return reference.attention(named, values[-1], base=config.rope_base, documents=documents, **heads)

    close(with_grads(ours, *leaves), with_grads(plain, *leaves))


@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 8))
def test_rotated_products_depend_on_the_distance_alone(i, j, shift):
    tables = rope(16, small_config(d_head=6, rope_base=100.0))
    q, k = (rotate(draw(1, 1, 1, 6, seed=n).expand(1, 16, 1, 6), tables)[0, :, 0] for n in (1, 2))
    close(q[i] @ k[j], q[i + shift] @ k[j + shift])
    close(q.norm(dim=-1), q[:1].norm(dim=-1).expand(16))
    assert torch.equal(q[0], draw(6, seed=1))


def test_rotation_turns_pair_i_by_the_position_over_the_base_to_the_2i_over_h():
    cos, sin = rope(3, small_config(d_head=4, rope_base=100.0))
    close(
        cos,
        torch.tensor([[1, 1], [1, 0.1], [2, 0.2]], dtype=torch.float64)
        .mul(torch.tensor([[0.0], [1.0], [1.0]]))
        .cos(),
    )
    close(sin[2], torch.tensor([2, 0.2], dtype=torch.float64).sin())


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_rope_table_is_float32_at_least_and_rotation_keeps_the_dtype(dtype, kept):
    tables = rope(3, small_config(), dtype)
    assert {t.dtype for t in tables} == {kept}
    assert rotate(draw(1, 3, 1, 4, dtype=dtype), tables).dtype == dtype


@EACH_VARIANT
def test_logits_and_gradients_are_those_of_a_model_of_loops(changes):
    config, batch = small_config(**changes), packed_batch()
    params, options = params_of(config), dict(config=config, documents=batch.documents)
    got = model.logits(params, batch.tokens, **options)
    close(got, reference.forward(params, batch.tokens, **options)[1])
    projection = draw(*got.shape, seed=9)
    got = named_grads(lambda p: (model.logits(p, batch.tokens, **options) * projection).sum(), params)
    close(
        got,
        named_grads(lambda p: (reference.forward(p, batch.tokens, **options)[1] * projection).sum(), params),
    )


@EACH_VARIANT
def test_the_training_loss_its_terms_and_gradients_are_those_of_whole_logits_and_loops(changes):
    config, batch = small_config(**changes, **WEIGHTS), packed_batch(seed=1)
    params = params_of(config)
    (loss, stats), grads = mk.value_and_grad(mk.next_token_loss, has_aux=True)(params, batch, config=config)
    want, want_grads = named_grads(lambda p: reference.loss(p, batch, config=config)[0], params)
    counts, n_targets = stats.pop("counts"), stats.pop("n_targets")
    n_routes, n_dropped = stats.pop("n_routes"), stats.pop("n_dropped")
    assert stats.pop("computed").sum() == n_routes
    assert (stats.pop("fullest") == n_routes // max(config.n_moe_layers, 1)).all()  # of one rank
    close((loss, stats), (want, reference.loss(params, batch, config=config)[1]))
    close(flat(grads), want_grads)
    assert n_targets == batch.n_targets and counts.shape == (config.n_moe_layers, config.n_experts)
    assert counts.sum(1).tolist() == [int(batch.n_tokens) * config.top_k] * config.n_moe_layers
    assert n_routes == batch.tokens.numel() * config.top_k * config.n_moe_layers and n_dropped == 0


def test_attention_across_documents_sees_whole_rows_and_leaves_the_targets_alone():
    config, batch = small_config(), packed_batch(seed=3)
    params = params_of(config)
    loss, stats = mk.next_token_loss(params, batch, config=config, attend_across_documents=True)
    scores = model.logits(params, batch.tokens, config=config).log_softmax(-1)
    want = -scores.gather(-1, batch.targets[..., None])[..., 0][batch.mask].mean()
    close(stats["cross_entropy"], want)
    inside, _ = mk.next_token_loss(params, batch, config=config)
    assert (loss - inside).abs() > 1e-3


def test_padding_influences_no_other_position_and_no_loss():
    config, batch = small_config(**WEIGHTS), packed_batch(seed=2)
    params, padding = params_of(config), batch.documents < 0
    assert padding.any()
    other = replace(
        batch,
        tokens=torch.where(padding, (batch.tokens + 5) % 17, batch.tokens),
        targets=torch.where(batch.mask, batch.targets, (batch.targets + 3) % 17),
    )
    hidden, changed = (
        model.forward(params, b.tokens, config=config, documents=b.documents)[0] for b in (batch, other)
    )
    close(hidden[~padding], changed[~padding])
    assert not torch.allclose(hidden[padding], changed[padding])
    run = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    (value, grads), (same, same_grads) = (run(params, b, config=config) for b in (batch, other))
    for _, stats in (value, same):
        assert stats.pop("computed").sum() == stats["n_routes"]  # padding is computed
    close((value, flat(grads)), (same, flat(same_grads)))


def test_a_packed_document_reads_as_if_it_stood_alone():
    config, batch = small_config(), packed_batch(seed=3)
    params = params_of(config)
    packed = model.logits(params, batch.tokens, config=config, documents=batch.documents)
    n = 0
    for row, documents in enumerate(batch.documents):
        for document in documents[documents >= 0].unique():
            at = documents == document
            close(packed[row, at], model.logits(params, batch.tokens[row, at][None], config=config)[0])
            n += 1
    assert n > len(batch.tokens)


@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 1, 1, 1), (3, 0, 1)])
def test_shares_of_the_loss_and_its_gradients_sum_to_the_whole(split):
    config, batch = small_config(**WEIGHTS), packed_batch(seed=4)
    params = params_of(config)
    run = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    (loss, stats), grads = run(params, batch, config=config)
    total, start = {}, 0
    for n in split:
        rows = torch.utils._pytree.tree_map(lambda x, a=start, n=n: x[a : a + n] if x.ndim else x, batch)
        (share, part), share_grads = run(params, rows, config=config)
        for name, x in {"loss": share, **part, **flat(share_grads)}.items():
            total[name] = total.get(name, 0) + x
        start += n
    close(total, {"loss": loss, **stats, **flat(grads)})


@pytest.mark.parametrize("recompute", ["block", ("attention",), ("ffn",), ["attention", "ffn"], ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_gives_the_same_bits_and_counts(recompute, dtype):
    config, batch = small_config(d_model=8, d_expert=8, **WEIGHTS), packed_batch()
    params = params_of(config, dtype)
    run = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    options = dict(config=config, assignment="random", key=mk.random.make_key(0))
    (loss, stats), grads = run(params, batch, **options)
    (same_loss, same_stats), same_grads = run(
        params, batch, block=mk.remat(model.transformer_block, recompute), **options
    )
    want, got = (
        {"loss": x[0], **x[1], **flat(x[2])}
        for x in ((loss, stats, grads), (same_loss, same_stats, same_grads))
    )
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert stats["counts"].sum() == batch.n_tokens * config.top_k


@EACH_VARIANT
def test_lower_precisions_stay_near_float64(changes):
    config, batch = small_config(**changes, d_expert=8), packed_batch()
    exact = params_of(config, torch.bfloat16)
    options = dict(config=config, assignment="uniform", key=mk.random.make_key(0))
    want = model.logits(exact.apply(lambda p: p.double()), batch.tokens, **options)
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        params = exact.apply(lambda p, dtype=dtype: p.to(torch.promote_types(p.dtype, dtype)))
        got = model.logits(params, batch.tokens, **options)
        assert got.dtype == torch.float32 and (got - want).norm() < tol * want.norm()


def test_a_compiled_block_is_one_graph_and_gives_the_loss_of_a_plain_one():
    config = small_config()
    params, batch = params_of(config), packed_batch(2, 6)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    block = torch.compile(model.transformer_block, backend=count, fullgraph=True)
    compiled, plain = (
        mk.next_token_loss(params, batch, config=config, block=b)[0] for b in (block, model.transformer_block)
    )
    close(compiled, plain)
    assert len(graphs) == 2  # a layer with a plain feed-forward, and one with experts


def test_biases_reach_the_layers_that_have_experts_in_their_order():
    config, batch = small_config(n_layers=3), packed_batch()
    params = params_of(config)
    biases = 100 * torch.eye(6)[[1, 4]]
    hidden, routings = model.forward(params, batch.tokens, config=config, biases=biases)
    assert [r.counts.argmax().item() for r in routings] == [1, 4]
    assert all(bool((r.expert_ids[:, 0] == e).all()) for r, e in zip(routings, (1, 4), strict=True))
    close(hidden, reference.forward(params, batch.tokens, config=config, biases=biases)[0])


def test_another_router_takes_the_place_of_route_in_every_layer():
    config, batch = small_config(n_layers=3, norm="peri"), packed_batch()
    params = params_of(config)
    turned = map_named(lambda name, p: -p if name.endswith("router") else p, params)
    block = partial(model.transformer_block, route=lambda router, x, **given: mk.route(-router, x, **given))
    found, want = (
        mk.next_token_loss(p, batch, config=config, block=b)
        for p, b in ((params, block), (turned, model.transformer_block))
    )
    close(found[0], want[0])
    assert torch.equal(found[1]["counts"], want[1]["counts"])


def test_random_assignments_follow_the_sample_and_differ_between_layers_and_keys():
    config, batch = small_config(n_layers=3), packed_batch()
    params = params_of(config)

    def ids(order, key=0):
        options = dict(
            config=config,
            assignment="random",
            key=mk.random.make_key(key),
            sample_ids=batch.sample_ids[order],
        )
        return [
            r.expert_ids.view(len(order), -1)
            for r in model.forward(params, batch.tokens[order], **options)[1]
        ]

    first, second = ids(torch.arange(4))
    order = torch.tensor([2, 0])
    assert torch.equal(ids(order)[0], first[order]) and torch.equal(ids(order)[1], second[order])
    assert not torch.equal(first, second) and not torch.equal(ids(torch.arange(4), 1)[0], first)
    assert torch.equal(ids(torch.arange(4)[:1])[0], first[:1])
    assert not torch.equal(
        first[0, 2:], first[1, :-2]
    )  # the second sample does not repeat the first one's draws


def test_a_call_without_rows_has_no_loss_and_zero_gradients():
    config = small_config(**WEIGHTS)
    batch = replace(packed_batch(0), n_targets=torch.tensor(5), n_tokens=torch.tensor(7))
    run = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    for dtype in (torch.float64, torch.float32):
        (loss, stats), grads = run(params_of(config, dtype), batch, config=config)
        assert loss.item() == 0 and not stats["counts"].any()
        assert not any(bool(g.any()) for g in flat(grads).values())


def test_a_batch_of_padding_alone_has_no_loss():
    batch = packed_batch()
    batch = mk.count_tokens(replace(batch, mask=batch.mask & False, documents=batch.documents * 0 - 1))
    config = small_config(**WEIGHTS)
    loss, stats = mk.next_token_loss(params_of(config), batch, config=config)
    assert loss.item() == 0 and batch.n_tokens == 0 and not stats["counts"].any()


@pytest.mark.parametrize("norm", ["pre", "post", "peri"])
@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
def test_norms_stand_where_their_placement_says(norm, layer):
    config, batch = small_config(norm=norm), packed_batch()
    params, x = params_of(config)["layers"][str(layer)], draw(4, 7, 8)
    kinds = {name.rpartition("_")[2] for name in params.keys() if "norm" in name}
    assert kinds == {"pre": {"in"}, "post": {"out"}, "peri": {"in", "out"}}[norm]
    mask = model.document_mask(batch.documents, dtype=torch.float64)
    got, routing = model.transformer_block(params, x, config=config, rope=rope(7, config), mask=mask)
    close(got, reference.block(params, x, config=config, documents=batch.documents)[0])
    assert (routing is None) == (layer == 0)


def test_a_block_without_experts_refuses_their_options():
    params = params_of(small_config())["layers"]["0"]
    with pytest.raises(TypeError, match=r"transformer_block needs no options of moe .*, got \['via'\]"):
        model.transformer_block(
            params, draw(1, 7, 8), config=small_config(), rope=rope(7, small_config()), via="local"
        )


def test_parameters_of_another_model_are_refused():
    config = small_config(tied_head=True)
    with pytest.raises(ValueError, match=r"parameters of its config, missing: \[\], unused: \['head'\]"):
        model.logits(params_of(small_config()), packed_batch().tokens, config=config)


def test_documents_may_have_any_numbers():
    tokens, odd = packed_batch().tokens, torch.tensor([[6] * 3 + [0] * 4, [9] * 7])
    even = torch.tensor([[0] * 3 + [1] * 4, [0] * 7])
    config = small_config(balance_weight=1.0)
    got, want = (
        mk.next_token_loss(
            params_of(config),
            mk.count_tokens(mk.batch.make_batch(tokens[:2], documents, torch.arange(2))),
            config=config,
        )[0]
        for documents in (odd, even)
    )
    assert torch.equal(got, want)


def test_a_tied_head_is_the_transposed_embedding():
    params = params_of(small_config(tied_head=True))
    assert "head" not in params.keys()
    assert torch.equal(model.head_weight(params), params["embedding"].T)


def test_rms_norm_divides_by_the_root_mean_square_with_eps_inside():
    x, gain = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    close(model.rms_norm(x, gain, 0.0), torch.tensor([[3.0, 8.0]]) / 12.5**0.5, 1e-6)
    close(model.rms_norm(x, gain, 3.5), torch.tensor([[0.75, 2.0]]), 1e-6)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        ("forward", dict(tokens=torch.tensor([[1, 17]])), "forward needs token ids in [0, 17), got [1, 17]"),
        ("forward", dict(tokens=torch.tensor([[-1, 3]])), "forward needs token ids in [0, 17), got [-1, 3]"),
        (
            "forward",
            dict(tokens=torch.zeros(1, 17).long()),
            "rope_table needs at most max_seq_len=16 positions, got 17; shorten the sequence or",
        ),
        ("forward", dict(biases=torch.zeros(2, 6)), "forward needs biases (1, 6), got (2, 6)"),
        (
            "forward",
            dict(block=mk.remat(model.transformer_block, ["mlp"])),
            "remat needs parts of the block, ['attention', 'ffn'], got ['mlp']",
        ),
        (
            "next_token_loss",
            dict(n_targets=None),
            "needs the totals of the global batch, got None; call batch = moekit.count_tokens(",
        ),
        (
            "next_token_loss",
            dict(targets=torch.full((4, 7), 17)),
            "next_token_loss needs token ids in [0, 17), got [17, 17]",
        ),
    ],
)
def test_bad_input_is_refused(call, changes, message):
    config, batch = small_config(), packed_batch()
    with refuses(message):
        if call == "forward":
            model.forward(params_of(config), **dict(tokens=batch.tokens, config=config) | changes)
        else:
            mk.next_token_loss(params_of(config), replace(batch, **changes), config=config)


def test_a_config_balances_groups_and_a_load_stands_for_the_batch():
    config, batch = small_config(balance_weight=0.5), packed_batch(seed=1)
    params = params_of(config)
    _, stats = mk.next_token_loss(params, batch, config=replace(config, balance_groups=1))
    close(stats["load_balancing"], torch.full_like(stats["load_balancing"], config.n_moe_layers))
    over_batch = replace(config, balance_population="batch")
    even = torch.ones(config.n_moe_layers, config.n_experts)
    _, stats = mk.next_token_loss(params, batch, config=over_batch, load=even)
    close(stats["load_balancing"], torch.full_like(stats["load_balancing"], config.n_moe_layers))
    _, other = mk.next_token_loss(params, batch, config=over_batch)
    assert abs(other["load_balancing"] - config.n_moe_layers) > 1e-3
