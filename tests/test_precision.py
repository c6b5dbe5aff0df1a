"""A policy, and what layers and models do under it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference import draw, flat, refuses
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

import moekit as mk
from moekit import checkpoint, config, precision
from moekit.batch import make_batch
from moekit.kernels.quantize import dequantize, quantize
from moekit.precision import (
    BF16,
    FORMATS,
    Precision,
    Rounded,
    all_products,
    hollow,
    preset,
    round_weights,
)

T, D, H, N_EXPERTS, K = 96, 64, 32, 8, 2
FP8, MXFP8 = (preset(name, emulate=True) for name in ("fp8_rowwise", "mxfp8"))
MODEL = config.toy(mk.preset("bench-8L", n_experts=N_EXPERTS))
EXPERTS = ("experts_forward", "experts_input_grad", "experts_weight_grad", "saved_activations")


def decibels(got, want):
    noise = sum(((a.double() - b.double()) ** 2).sum() for a, b in zip(got, want, strict=True))
    return (10 * (sum((b.double() ** 2).sum() for b in want) / noise).log10()).item()


def layer(policy, dtype=torch.float32, **options):
    """Return output and gradients (tokens, router, both matrices) of a layer whose routing is given."""
    x, router = draw(T, D, dtype=dtype), draw(D, N_EXPERTS, seed=1, dtype=dtype) * D**-0.5
    gate_up = draw(N_EXPERTS, D, 2 * H, seed=2, dtype=dtype) * D**-0.5
    down = draw(N_EXPERTS, H, D, seed=3, dtype=dtype) * H**-0.5
    leaves = [z.requires_grad_() for z in (x, router, gate_up, down)]
    params = {"router": router, "experts": {"gate_up": gate_up, "down": down}}
    fixed = dict(assignment="random", key=mk.random.make_key(4))
    y, _ = mk.moe(params, x, top_k=K, precision=policy, **fixed, **options)
    return y, *torch.autograd.grad(y, leaves, draw(T, D, seed=5, dtype=dtype))


# --- The policy -----------------------------------------------------------------------


def test_a_policy_says_of_each_role_what_it_is_and_why():
    said = dict(line.split(None, 1) for line in str(replace(FP8, saved_activations="mxfp8")).splitlines())
    assert said["experts_forward"].startswith("fp8_rowwise, emulated: a device of type cpu has no units")
    assert said["saved_activations"] == "mxfp8, stored"
    assert said["experts_weight_grad"] == "as the tensors"
    assert said["router"] == "float32, a rounded score sends a token to other experts"
    assert said["head"].startswith("as the tensors, the loss is made of small differences")
    assert "REFUSED" in str(precision.FP8_ROWWISE) and "REFUSED" not in str(BF16)


@pytest.mark.parametrize(
    ("role", "value", "message"),
    [
        ("experts_forward", "fp4", "Precision needs experts_forward of None, 'fp8_rowwise', 'mxfp8'"),
        ("router", "mxfp8", "got 'mxfp8': a rounded score sends a token to other experts"),
        ("gradient_accumulation", "bf16", "gradient_accumulation of 'float32', got 'bf16'"),
        ("head", "fp8_rowwise", "Precision needs head of None, got 'fp8_rowwise'"),
        ("dispatch_payload", "mxfp8", "Precision needs dispatch_payload of None, 'fp8_rowwise', got 'mxfp8'"),
        ("emulate", "yes", "Precision needs emulate of True or False, got 'yes'"),
    ],
)
def test_a_format_that_a_role_does_not_have_is_refused(role, value, message, unchecked):
    with refuses(message):
        Precision(**{role: value})


def test_an_entry_that_matches_nothing_is_refused():
    with pytest.raises(TypeError, match="experts_froward"):
        Precision(experts_froward="mxfp8")
    dense = replace(MODEL, n_dense_layers=MODEL.n_layers)
    with refuses("Precision needs roles that the model has, got experts_forward, experts_input_grad"):
        MXFP8.check(dense)
    bare = replace(MODEL, n_dense_layers=0, d_shared=0)
    with refuses("that the model has, got feed_forward; leave them out: preset(name, feed_forward=None)"):
        MXFP8.check(bare)
    preset("mxfp8", feed_forward=None).check(bare)
    with refuses("got dense_weight_grad"):  # of products that are not rounded
        Precision(dense_weight_grad="mxfp8", emulate=True).check(MODEL)
    with refuses("dispatch_payload"):
        layer(Precision(dispatch_payload="fp8_rowwise"))


def test_hardware_without_the_format_is_named_unless_it_may_be_emulated():
    with refuses("needs a device's units for experts_forward='fp8_rowwise': a device of type cpu has no"):
        layer(precision.FP8_ROWWISE)
    saved = layer(Precision(saved_activations="fp8_rowwise"))  # nothing multiplies it
    assert decibels(saved[1:], layer(BF16)[1:]) > 25


# --- A layer --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "least"), [("fp8_rowwise", 24.0), ("mxfp8", 24.0), ("mxfp8_floor", 22.5)])
def test_gradients_of_a_layer_have_their_signal_to_noise(form, least, dtype):
    want = layer(BF16)
    got = layer(all_products(form, emulate=True), dtype)
    assert least < decibels(got[1:], want[1:]) < least + 4
    assert all(g.dtype == dtype for g in got)


@pytest.mark.parametrize("role", EXPERTS)
def test_each_role_alone_rounds_what_it_says_and_no_more(role):
    want, got = layer(BF16), layer(Precision(**{role: "mxfp8"}, emulate=True))
    y, tokens, _, gate_up, down = (decibels([a], [b]) for a, b in zip(got, want, strict=True))
    exact = 100
    assert (y > exact) == (role != "experts_forward")
    assert (tokens > exact) == (role == "experts_weight_grad")
    assert min(gate_up, down) < 40


def by_hand(x, gate_up, down, form):
    """The forward of one expert, every operand rounded along what is summed over."""

    def rounded(z):
        return dequantize(quantize(z.contiguous(), FORMATS[form]), torch.float64)

    gate, up = (rounded(x) @ rounded(gate_up.mT).mT).chunk(2, -1)
    return rounded((torch.nn.functional.silu(gate) * up).float()) @ rounded(down.mT).mT


@pytest.mark.parametrize("form", FORMATS)
def test_an_expert_multiplies_rounded_rows_with_rounded_weights(form):
    x, experts = draw(40, D, dtype=torch.float32), TensorDict()
    experts["gate_up"] = draw(2, D, 2 * H, seed=1, dtype=torch.float32) * D**-0.5
    experts["down"] = draw(2, H, D, seed=2, dtype=torch.float32) * H**-0.5
    ends = torch.tensor([25, 40]).int()
    got = mk.expert_forward(experts, x, ends, precision=all_products(form, emulate=True))
    parts = [
        by_hand(rows, gate_up, down, form)
        for rows, gate_up, down in zip(x.split([25, 15]), experts["gate_up"], experts["down"], strict=True)
    ]
    want = torch.cat(parts)
    assert decibels([got], [want]) > 50  # a hidden number may fall to the other side


@pytest.mark.parametrize("weight_grad", [None, "fp8_rowwise"])
def test_weights_gradients_go_to_buffers_that_are_given(weight_grad):
    policy = replace(FP8, experts_weight_grad=weight_grad)
    want = layer(policy)
    params = {"gate_up": torch.ones(N_EXPERTS, D, 2 * H), "down": torch.ones(N_EXPERTS, H, D)}
    x, router = draw(T, D, dtype=torch.float32), draw(D, N_EXPERTS, seed=1, dtype=torch.float32) * D**-0.5
    experts = {
        "gate_up": draw(N_EXPERTS, D, 2 * H, seed=2, dtype=torch.float32) * D**-0.5,
        "down": draw(N_EXPERTS, H, D, seed=3, dtype=torch.float32) * H**-0.5,
    }
    for w in experts.values():
        w.requires_grad_()
    fixed = dict(assignment="random", key=mk.random.make_key(4))
    layer_params = {"router": router, "experts": experts}
    y, _ = mk.moe(layer_params, x, top_k=K, precision=policy, grad_into=params, **fixed)
    y.backward(draw(T, D, seed=5, dtype=torch.float32))
    assert all(w.grad is None for w in experts.values())
    torch.testing.assert_close(params["gate_up"] - 1, want[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(params["down"] - 1, want[4], rtol=1e-5, atol=1e-5)


def test_kernels_give_what_plain_torch_does():
    pytest.importorskip("triton")
    got, want = layer(FP8, kernels="triton"), layer(FP8, kernels="torch")
    y, tokens, router, gate_up, down = (decibels([a], [b]) for a, b in zip(got, want, strict=True))
    assert min(y, gate_up, down) > 100
    assert min(tokens, router) > 20  # kernels find the routing weights' gradient behind a rounded product


def test_a_graph_that_is_retained_gives_the_same_gradients_again():
    pytest.importorskip("triton")
    x = draw(12, D, dtype=torch.float32).requires_grad_()
    experts = {
        "gate_up": draw(N_EXPERTS, D, 2 * H, dtype=torch.float32),
        "down": draw(N_EXPERTS, H, D, dtype=torch.float32),
    }
    params = {"router": draw(D, N_EXPERTS, dtype=torch.float32), "experts": experts}
    for kernels in ("torch", "triton"):
        y, _ = mk.moe(params, x, top_k=K, precision=FP8, kernels=kernels)
        first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_no_tokens_and_no_rows_pass(kernels="auto"):
    x, experts = (
        draw(0, D, dtype=torch.float32).requires_grad_(),
        {
            "gate_up": draw(2, D, 2 * H, dtype=torch.float32).requires_grad_(),
            "down": draw(2, H, D, dtype=torch.float32).requires_grad_(),
        },
    )
    ends = torch.zeros(2, dtype=torch.int32)
    for policy in (BF16, FP8, replace(MXFP8, experts_weight_grad="mxfp8")):
        y = mk.expert_forward(experts, x, ends, precision=policy)
        grads = torch.autograd.grad(y.sum(), [x, *experts.values()])
        assert y.shape == (0, D) and not any(g.any() for g in grads)
    matrices = {name: w[0].detach().requires_grad_() for name, w in experts.items()}
    for policy in (FP8, replace(MXFP8, dense_weight_grad="mxfp8", saved_activations="mxfp8")):
        y = mk.model.feed_forward(matrices, x, precision=policy)
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), [x, *matrices.values()]))


def test_a_token_that_is_not_finite_is_seen_in_its_row_and_in_no_other():
    gate_up = draw(N_EXPERTS, D, 2 * H, dtype=torch.float32)
    params = {"router": torch.zeros(D, N_EXPERTS), "experts": {"gate_up": gate_up, "down": gate_up.mT[:, :H]}}
    x = draw(8, D, dtype=torch.float32)
    x[3, 5] = torch.inf
    fixed = dict(assignment="random", key=mk.random.make_key(0))
    for policy in (FP8, MXFP8):
        y, _ = mk.moe(params, x, top_k=K, precision=policy, **fixed)
        assert y[3].isnan().all() and y[torch.arange(8) != 3].isfinite().all()


def test_what_a_layer_keeps_in_eight_bits_is_less():
    def kept(policy):
        sizes = {}

        def note(x):
            sizes[x.data_ptr()] = x.numel() * x.element_size()
            return x

        x, w = draw(64, D, dtype=torch.float32).requires_grad_(), draw(D, 2 * H, dtype=torch.float32)
        w, down = w.requires_grad_(), draw(H, D, dtype=torch.float32).requires_grad_()
        rounded = round_weights(TensorDict(ffn=TensorDict(gate_up=w.detach(), down=down.detach())), policy)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = mk.model.feed_forward(dict(gate_up=w, down=down), x, precision=rounded.part("ffn"))
        del y
        return (
            sum(sizes.values())
            - sum(t.numel() * t.element_size() for t in flat(rounded.weights).values()) / 2
        )

    for policy in (FP8, MXFP8):
        saved = replace(policy, saved_activations=policy.feed_forward)
        assert kept(policy) - kept(saved) >= 64 * 2 * H * 4 * 0.7


# --- A model --------------------------------------------------------------------------


def batch(n=2, length=32):
    tokens = torch.randint(MODEL.vocab_size, (n, length + 1), generator=torch.Generator().manual_seed(1))
    return mk.count_tokens(make_batch(tokens, torch.zeros_like(tokens), torch.arange(n)))


def loss_and_grads(params, policy, **options):
    options |= dict(config=MODEL, assignment="random", key=mk.random.make_key(0), precision=policy)
    grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    (loss, _), grads = grad_fn(params, batch(), **options)
    return loss, flat(grads)


@pytest.fixture(scope="module")
def params():
    return mk.init_params(MODEL, seed=0, dtype=torch.float32)


@pytest.mark.parametrize(
    "policy", [FP8, replace(MXFP8, saved_activations="mxfp8", dense_weight_grad="mxfp8")]
)
def test_a_model_reads_weights_rounded_once_and_hollow_ones_alike(policy, params):
    loss, grads = loss_and_grads(params, policy)
    rounded = round_weights(params, policy)
    for given in (params, hollow(params, policy)):
        again, same = loss_and_grads(given, rounded)
        assert torch.equal(loss, again) and all(torch.equal(grads[name], same[name]) for name in grads)


def test_rounding_reaches_every_product_it_names_and_nothing_else(params):
    _, want = loss_and_grads(params, BF16)
    _, got = loss_and_grads(params, FP8)
    assert 5 < decibels([got[n] for n in want], want.values()) < 15  # of eight layers, one after another
    matrices = {name for name in want if name.split(".")[-1] in ("qkv", "out", "gate_up", "down")}
    sizes = {name for name, w in flat(params).items() if w.ndim > 1}
    assert sizes - matrices == {name for name in sizes if "router" in name or name in ("embedding", "head")}
    named = {name.rsplit(".", 2)[0] for name in flat(round_weights(params, FP8).weights)}
    assert named == matrices


class Conversions(TorchDispatchMode):
    """Count conversions to eight bits by shape."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype.itemsize == 1 and out.is_floating_point():
            self.shapes[tuple(out.shape)] += args[0].dtype.itemsize > 1
        return out


def test_what_products_read_is_rounded_and_nothing_else(params):
    low, given = round_weights(params, FP8), batch(length=24)
    with Conversions() as seen:
        grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
        grad_fn(params, given, config=MODEL, precision=low)
    n_layers, n_moe, t = MODEL.n_layers, MODEL.n_moe_layers, 2 * 24
    r, d, h = t * MODEL.top_k, MODEL.d_model, MODEL.d_expert
    assert (d, h, MODEL.d_shared, MODEL.d_dense) == (64, 64, 64, 320) and n_layers - n_moe == 1
    assert +seen.shapes == {
        # What qkv, out, dense and shared products read, shared hidden rows; gradients of those but qkv's.
        (t, 64): (2 * n_layers + 1 + 2 * n_moe) + (n_layers + 1 + n_moe),
        (r, 64): 3 * n_moe,  # rows, hidden rows, gradients
        (t, 96): n_layers,  # gradients of qkv's output, then of first products
        (t, 128): n_moe,
        (r, 128): n_moe,
        (t, 320): 1,  # the dense layer's hidden rows
        (t, 640): 1,
    }


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_what_norms_have_rounded_is_what_the_next_product_reads(kernels, params):
    if kernels == "triton":
        pytest.importorskip("triton")
    model = replace(MODEL, norm="pre", n_layers=2, n_experts=4, top_k=2)
    params = mk.init_params(model, dtype=torch.float32)["layers", "1"]
    x = draw(1, 8, 64, dtype=torch.float32)
    rope = tuple(table[:8] for table in mk.model.rope_table(8, config=model, like=x))
    options = dict(config=model, rope=rope, kernels=kernels, precision=FP8)
    want, _ = mk.model.transformer_block(params, x, **options)
    alone = replace(FP8, attention_projections=None, feed_forward=None)
    assert (
        decibels([want], [mk.model.transformer_block(params, x, **options | dict(precision=alone))[0]]) < 60
    )
    seen = []
    rounded = mk.model.rms_norm_quantized

    def note(*args, **kwargs):
        y, low = rounded(*args, **kwargs)
        seen.append(low)
        return y, low

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mk.model, "rms_norm_quantized", note)
        got, _ = mk.model.transformer_block(params, x, **options)
        assert torch.equal(got, want) and len(seen) == 2  # before attention and before the shared expert
        patch.setattr(mk.model, "rms_norm_quantized", lambda *a, **k: (rounded(*a, **k)[0], None))
        got, _ = mk.model.transformer_block(params, x, **options)
    assert decibels([got], [want]) > 100


def test_tokens_that_were_rounded_otherwise_are_refused(params):
    ffn, x = params["layers", "0", "ffn"], draw(3, 64, dtype=torch.float32)
    for tokens in (quantize(x, FORMATS["mxfp8"]), quantize(x[:2], FORMATS["fp8_rowwise"])):
        with refuses("feed_forward needs tokens (3, 64) rounded to Format("):
            mk.model.feed_forward(ffn, x, precision=Rounded(FP8, tokens=tokens))


def test_widths_that_do_not_fit_a_format_are_refused_before_anything_runs():
    with refuses("multiples of 32 for experts_forward='mxfp8', got d_expert=40"):
        MXFP8.check(replace(MODEL, d_expert=40))
    with refuses("multiples of 16 for attention_projections='fp8_rowwise', got d_model=72, qkv=24"):
        FP8.check(replace(MODEL, d_model=72, n_heads=4, n_kv_heads=1, d_head=4))
    FP8.check(MODEL)


@pytest.mark.parametrize("policy", [FP8, replace(MXFP8, saved_activations="mxfp8")], ids=["fp8", "mxfp8"])
def test_recomputed_blocks_have_the_same_gradients(policy, params):
    low = round_weights(params, policy)
    _, want = loss_and_grads(params, low)
    for recompute in ("block", ("ffn",)):
        block = mk.remat(mk.model.transformer_block, recompute)
        _, got = loss_and_grads(params, low, block=block)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_compiled_layer_takes_new_weights_without_compiling_again(params):
    graphs, x = [], draw(8, 64, dtype=torch.float32)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(mk.moe, backend=count, fullgraph=True)
    for scale in (1.0, 2.0, 3.0):
        moe = params["layers", "1", "moe"].apply(lambda w, scale=scale: w * scale)
        low = Rounded(FP8, round_weights(moe, FP8).weights)
        options = dict(top_k=2, precision=low, assignment="random", key=mk.random.make_key(int(scale)))
        assert decibels([compiled(moe, x, **options)[0]], [mk.moe(moe, x, **options)[0]]) > 60
    assert len(graphs) == 1


def test_rounded_weights_are_kept_in_the_memory_of_bfloat16(params):
    rounded = flat(round_weights(params, FP8).weights)
    n_bytes = sum(x.numel() * x.element_size() for name, x in rounded.items() if name.endswith("values"))
    n_scales = sum(x.numel() * x.element_size() for name, x in rounded.items() if name.endswith("scales"))
    names = {name.rsplit(".", 2)[0] for name in rounded}
    assert n_bytes == sum(2 * flat(params)[name].numel() for name in names)
    assert n_scales < n_bytes / 8  # at this width
    empty = flat(hollow(params, FP8))
    assert all(empty[name].untyped_storage().nbytes() == 4 for name in names)
    assert all(empty[name] is w for name, w in flat(params).items() if name not in names)


def test_weights_of_another_policy_or_none_are_refused(params):
    other = Rounded(FP8, round_weights(params, MXFP8).weights)
    with refuses("rounded to Format(elements=torch.float8_e4m3fn, block=None, rounding=None), got torch.f"):
        loss_and_grads(params, other)
    forward = round_weights(params, Precision(experts_forward="fp8_rowwise", emulate=True))
    both = Precision(experts_forward="fp8_rowwise", experts_input_grad="fp8_rowwise", emulate=True)
    with refuses("gate_up for its input's gradient, (8, 64, 128), rounded to Format("):
        loss_and_grads(params, Rounded(both, forward.weights))
    with refuses(
        "attention needs qkv for the product, (96, 64), rounded to"
    ):  # a part that has none is not rounded here
        loss_and_grads(params, Rounded(FP8, forward.weights))
    for policy in (BF16, FP8):
        with refuses("got a hollow one"):
            loss_and_grads(hollow(params, FP8), policy)


@pytest.mark.parametrize("role", precision.ROLES)
def test_a_model_takes_each_role_alone_with_weights_that_have_been_rounded(role, params):
    if role == "dispatch_payload":
        policy = Precision(dispatch_payload="fp8_rowwise")  # of a transport
        with refuses("needs a transport with payload=torch.float8_e4m3fn"):
            loss_and_grads(params, policy)
        return
    dense = dict(feed_forward="mxfp8") if role == "dense_weight_grad" else {}
    policy = Precision(**{role: "mxfp8"}, **dense, emulate=True)
    loss, grads = loss_and_grads(params, policy)
    again, same = loss_and_grads(params, round_weights(params, policy))
    assert torch.equal(loss, again) and all(torch.equal(grads[name], same[name]) for name in grads)
    _, want = loss_and_grads(params, BF16)
    assert 5 < decibels([grads[n] for n in want], want.values()) < 50


def test_what_is_no_policy_and_tokens_that_do_not_fit_are_named(params, unchecked):
    for given in ("mxfp8", None):
        with pytest.raises(TypeError, match="precision needs a Precision or Rounded, got"):
            loss_and_grads(params, given)
    ffn = params["layers", "0", "ffn"]
    for policy in (BF16, FP8):
        with refuses("feed_forward needs x (*n, 64) for gate_up (64, 640), got (2, 32)"):
            mk.model.feed_forward(ffn, torch.zeros(2, 32), precision=policy)
        with refuses("feed_forward needs one dtype, got x torch.int64 and gate_up torch.float32"):
            mk.model.feed_forward(ffn, torch.zeros(2, 64, dtype=torch.long), precision=policy)
    with refuses("preset needs a name of"):
        preset(["mxfp8"])
    roles = "attention_projections, feed_forward, dense_weight_grad, experts_forward, experts_input_grad, "
    with refuses(f"preset needs changes of {roles}", TypeError) as error:
        preset("mxfp8", expert_forward=None, emulate=True)
    assert str(error.value).endswith(", emulate, got expert_forward")
    if not torch.cuda.is_available():
        assert "REFUSED: there is no CUDA device to ask" in precision.FP8_ROWWISE.describe("cuda")


def test_weights_of_experts_alone_are_rounded_too(params):
    experts, x = params["layers", "1", "moe", "experts"], draw(9, 64, dtype=torch.float32)
    ends = torch.tensor([3, 3, 4, 5, 6, 7, 8, 9], dtype=torch.int32)
    low = round_weights(experts, FP8)
    assert torch.equal(
        mk.expert_forward(experts, x, ends, precision=low), mk.expert_forward(experts, x, ends, precision=FP8)
    )
    assert not flat(round_weights(params["layers", "0", "ffn"], low).weights).keys() - {
        f"{name}.{product}.{part}"
        for name in ("gate_up", "down")
        for product in ("forward", "input_grad")
        for part in ("values", "scales")
    }


def train(params, policy, *, steps, is_hollow):
    """Return losses of steps of AdamW, with weights rounded from the masters or from the parameters."""
    optimizer = mk.shard_optimizer(mk.adamw(1e-3))
    state, losses = optimizer.init(params), []
    if is_hollow:
        params = hollow(params, policy)
    for _ in range(steps):
        weights = state["master"] if is_hollow else params
        grad_fn = mk.accumulate(mk.value_and_grad(mk.next_token_loss, has_aux=True), 2)
        options = dict(config=MODEL, precision=round_weights(weights, policy))
        (loss, _), grads = grad_fn(params, batch(), **options)
        losses.append(loss.item())
        params, state = optimizer.update(grads, state, params)
    return losses, params, state


def test_masters_alone_train_a_model_whose_parameters_are_hollow(params):
    want, _, _ = train(params.clone(), FP8, steps=3, is_hollow=False)
    got, empty, _ = train(params.clone(), FP8, steps=3, is_hollow=True)
    assert got == want and got[2] < got[0]
    assert flat(empty)["layers.1.moe.experts.gate_up"].isnan().all()


def test_masters_need_values_and_optimizers_without_them_refuse_hollow_parameters(params):
    with refuses("shard_optimizer needs parameters with values for its masters, got hollow ones"):
        mk.shard_optimizer(mk.adamw(1e-3)).init(hollow(params, FP8))


def test_a_checkpoint_leaves_hollow_parameters_out_and_either_is_read_into_hollow_ones(params, tmp_path):
    _, empty, state = train(params.clone(), FP8, steps=1, is_hollow=True)
    checkpoint.save(tmp_path / "low", {"params": empty, "state": state})
    fresh = mk.shard_optimizer(mk.adamw(1e-3)).init(params)
    read = checkpoint.load(tmp_path / "low", {"params": hollow(params, FP8), "state": fresh})
    assert all(torch.equal(a, flat(state)[name]) for name, a in flat(read["state"]).items())
    says = "hollow in the checkpoint, of a run that had it in eight bits alone; go on with its precision"
    with refuses(f"params.layers.1.moe.experts.down: {says}"):
        checkpoint.load(tmp_path / "low", {"params": params.clone(), "state": fresh})

    for other in (
        hollow(params, FP8).update({"extra": torch.tensor(torch.nan).expand(3)}),
        {"norm": params["norm"]},
    ):
        with refuses("the checkpoint"):
            checkpoint.load(tmp_path / "low", {"params": other, "state": fresh})

    _, whole, state = train(params.clone(), BF16, steps=1, is_hollow=False)
    checkpoint.save(tmp_path / "wide", {"params": whole, "state": state})
    read = checkpoint.load(tmp_path / "wide", {"params": hollow(params, FP8), "state": fresh})
    assert all(torch.equal(a, flat(state)[name]) for name, a in flat(read["state"]).items())
    assert torch.equal(flat(read["params"])["norm"], flat(whole)["norm"])
