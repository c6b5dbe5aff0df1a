"""What is logged of the experts' load and of the ranks that wait for it."""

import pytest
import torch
from reference import refuses

import moekit as mk
from moekit import balance, tracking
from moekit.testing import ranks
from moekit.tracking._report import heat_map


def test_the_load_of_a_balanced_layer_is_one_and_the_worst_layer_stands_for_all():
    figures = tracking.load_figures(torch.tensor([[5, 5, 5], [0, 0, 30]]), first_layer=2)
    layers = {name: x for name, x in figures.items() if name.startswith("load_layers")}
    assert layers == {
        "load_layers/max_over_mean/2": 1.0,
        "load_layers/max_over_mean/3": 3.0,
        "load_layers/min_over_mean/2": 1.0,
        "load_layers/min_over_mean/3": 0.0,
        "load_layers/cv/2": 0.0,
        "load_layers/cv/3": pytest.approx(2**0.5),
        "load_layers/entropy/2": pytest.approx(1.0),
        "load_layers/entropy/3": 0.0,
        "load_layers/dead/2": 0,
        "load_layers/dead/3": 2,
    }
    worst = dict(max_over_mean=3.0, min_over_mean=0.0, entropy=0.0, dead=2)
    assert worst.items() <= {k.removeprefix("load/"): x for k, x in figures.items()}.items()


def test_a_layer_without_rows_counts_as_even():
    figures = tracking.load_figures(torch.zeros(1, 4, dtype=torch.int64))
    assert figures["load/max_over_mean"] == figures["load/min_over_mean"] == 1.0 and not figures["load/dead"]
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    waits = tracking.wait_figures(torch.zeros(1, 4, dtype=torch.int64), nothing, ep=2)
    assert waits["wait/waited"] == 1.0 and waits["wait/gap"] == waits["wait/rows"] == 0.0


def test_batches_sorted_by_domain_wait_and_no_sum_of_a_step_shows_it():
    ep, n_rows = 4, 100
    rows = balance.sorted_by_domain(ep, n_rows=n_rows)
    counts = rows.sum((0, 1))
    fullest = balance.rank_load(rows.sum(1), ep).amax(-1).sum(0)[:, None]
    figures = tracking.wait_figures(counts, fullest, ep=ep, ms_per_row=0.5)
    gap = balance.gerrymandering_gap(rows, ep)
    assert figures["wait/waited"] == gap.waited.item() == ep
    assert figures["wait/seen"] == gap.seen.item() == 1.0
    assert figures["wait/gap"] == figures["wait_layers/gap/0"] == ep - 1
    assert figures["wait/rows"] == balance.wait(rows, ep).sum().item() > 0
    assert figures["wait/ms"] == 0.5 * figures["wait/rows"]


def test_copies_of_the_experts_wait_at_the_same_time_and_layers_weigh_as_their_rows():
    rows = torch.randint(0, 50, (3, 2, 2, 8), generator=torch.Generator().manual_seed(0))  # m, copies, l, E
    rows[:, :, 1] *= 3
    load = balance.rank_load(rows, 4)
    fullest, counts = load.amax(-1).sum(0).T, rows.sum((0, 1))
    figures = tracking.wait_figures(counts, fullest, ep=4)
    assert figures["wait/rows"] == balance.step_wait(rows, 4, edp=2).rows.item()
    even = counts.sum() / 4 / 2
    longest = max(load[:, i].amax(-1).sum() for i in range(2))
    assert figures["wait/waited"] == pytest.approx((longest / even).item())
    seen = balance.rank_load(counts, 4).amax(-1).sum() / 2 / even
    assert figures["wait/gap"] == pytest.approx(figures["wait/waited"] - seen.item())


def test_a_pipelines_ranks_wait_at_the_same_time_each_for_the_slowest_copy_of_its_own_layers():
    computed, fullest = torch.full((2, 4), 8), torch.tensor([[10, 6], [6, 10]])  # even: 32 / (2 * 2) = 8
    alone = tracking.wait_figures(computed, fullest, ep=2)  # both copies take 16
    assert (alone["wait/rows"], alone["wait/waited"]) == (0.0, 1.0)
    figures = tracking.wait_figures(computed, fullest, ep=2, stages=[[0], [1]])  # 10 - 8 in each
    assert (figures["wait/rows"], figures["wait/waited"], figures["wait/gap"]) == (2.0, 1.25, 0.25)
    three = tracking.wait_figures(computed, fullest, ep=2, stages=[[], [1], [0]])  # one rank is all dense
    assert (three["wait/rows"], three["wait/waited"]) == (4 / 3, 1.25)
    with refuses("wait_of_sums needs each of 2 layers in one stage, got [[0], [0]]"):
        tracking.wait_figures(computed, fullest, ep=2, stages=[[0], [0]])


def test_progress_takes_the_stages_of_each_rank_of_a_pipeline():
    config = mk.preset("tiny", n_layers=5, n_dense_layers=1)
    stages = [
        mk.config.Stage(layers=range(*of), embeds=False, heads=False) for of in ((0, 2), (2, 4), (4, 5))
    ]
    counts, fullest = torch.full((4, 2), 16), torch.tensor([[10, 6], [6, 10], [6, 10], [10, 6]])
    stats = dict(cross_entropy=torch.tensor(2.0), counts=counts, computed=counts, fullest=fullest)

    def rank():
        mesh = mk.make_mesh(pp=2, device="cpu")
        options = dict(tokens_per_step=10, config=config, mesh=mesh)
        with refuses("Progress needs the stages of each of 2 ranks of a pipeline, got those of 1"):
            tracking.Progress(Records(), 1, **options)
        progress = tracking.Progress(records := Records(), 1, stages=[stages[::2], stages[1:2]], **options)
        progress.ep = 2  # as of a mesh
        for _ in progress:
            progress.log(stats)
        return [(x["wait/rows"], x["wait/waited"]) for x in records]

    # Even: 8 a layer. The ranks' layers with experts are 0 and 3, 1 and 2: the slowest copy takes 20 in each.
    assert ranks(2)(rank) == [[(20 - 16, 20 / 16)], []]


class Records(list):
    def log(self, figures, step):
        self.append(figures)


@pytest.mark.parametrize("ep", [1, 2])
def test_progress_says_what_ranks_wait_for_where_several_share_the_experts(ep, capsys):
    records, config = Records(), mk.preset("tiny")
    progress = tracking.Progress(records, 1, tokens_per_step=10, config=config, peak_flops=1e9)
    progress.ep = ep  # as of a mesh
    stats = dict(cross_entropy=torch.tensor(2.0), counts=torch.tensor([[3, 4], [4, 3]]))  # without padding
    stats |= dict(computed=torch.tensor([[4, 4], [4, 4]]), fullest=torch.tensor([[6], [4]]))
    for _ in progress:
        progress.log(stats | dict(router_entropy=torch.tensor(0.5)))
    (figures,) = records
    assert figures["router/entropy"] == 0.5
    assert ("wait/waited" in figures) == (ep == 2)
    assert ("waited 1.25, seen 1.00" in capsys.readouterr().out) == (ep == 2)
    if ep == 2:
        assert figures["wait/ms"] == pytest.approx(2 * 18 * config.d_model * config.d_expert / 1e6)
        assert figures[f"wait_layers/waited/{config.n_dense_layers}"] == 1.5


def test_the_heat_map_is_blue_below_the_mean_of_a_layer_and_red_above():
    image = heat_map({"1": [0, 2], "2": [10, 10]})
    assert image.shape == (8, 8, 3)
    low, high, even = image[0, 0].astype(int), image[0, 7].astype(int), image[7, 0].astype(int)
    assert low[2] > low[0] + 50 and high[0] > high[2] + 50 and abs(even[0] - even[2]) < 10


def test_a_layer_that_drops_rows_does_not_change_what_is_said_of_another():
    computed, fullest = (
        torch.tensor([[4, 4, 0, 0], [3, 1, 2, 2]]),
        torch.tensor([[8], [4]]),
    )  # 8 of 8 and 4 of 8 rows
    figures = tracking.wait_figures(computed, fullest, ep=2, first_layer=1)
    assert (figures["wait_layers/waited/1"], figures["wait_layers/gap/1"]) == (2.0, 0.0)
    assert (figures["wait_layers/waited/2"], figures["wait_layers/gap/2"]) == (1.0, 0.0)


@pytest.mark.parametrize(("ep", "n_microbatches"), [(2, 3), (1, 3)])
def test_a_run_of_ranks_logs_what_its_own_statistics_say(tmp_path, ep, n_microbatches):
    config = mk.ModelConfig(
        vocab_size=64, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_head=8, n_experts=8, top_k=2,
        d_expert=16, max_seq_len=32,
    )  # fmt: skip

    def rank():
        mesh = mk.make_mesh(ep=ep, device="cpu")
        params = mk.init_params(config, mesh=mesh)
        tokens = torch.arange(6 * 32).view(6, 32) % 64
        documents = torch.zeros_like(tokens)
        documents[:, 20:] = -1  # padding
        batch = mk.count_tokens(mk.batch.make_batch(tokens, documents, torch.arange(6)), mesh=mesh)
        loss_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
        grad_fn = mk.accumulate(loss_fn, n_microbatches)
        (_, stats), _ = grad_fn(params, batch, config=config, mesh=mesh)
        stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
        run = tracking.Run(tmp_path if mesh.get_rank() == 0 else None)
        progress = tracking.Progress(run, 1, tokens_per_step=1, config=config, mesh=mesh)
        for _ in progress:
            progress.log(stats)
        return stats["fullest"].sum().item(), stats["n_routes"].item()

    (fullest, n_routes), _ = ranks(2)(rank)
    (figures,) = tracking.read_metrics(tmp_path).values()
    if ep == 1:  # each rank holds all experts: none waits for another in a layer
        assert fullest == n_routes and "wait/waited" not in figures
    else:
        assert figures["wait/waited"] == pytest.approx(2 * fullest / n_routes)
        assert figures["wait/waited"] > 1.0
        assert figures["wait/rows"] == pytest.approx(fullest - n_routes / 2)
    assert 0 < figures["router/entropy"] < torch.tensor(8.0).log()
