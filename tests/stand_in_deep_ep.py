"""What moekit uses of DeepEP 2, as it is documented, over gloo.

Tokens arrive in a random order, another one in each call, unless a handle says in which: a dispatch with a
handle repeats the order of the one that returned the handle, which is all that DeepEP promises.
"""

from itertools import pairwise
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist


def library():
    module = ModuleType("deep_ep")
    module.ElasticBuffer, module.topk_idx_t = ElasticBuffer, torch.int64
    return module


class ElasticBuffer:
    def __init__(self, group, *, num_max_tokens_per_rank, hidden, num_topk, explicitly_destroy):
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        self.destroyed, self.num_bytes = not explicitly_destroy, 2**21

    def destroy(self):
        assert not self.destroyed
        self.destroyed = True
        dist.barrier(self.group)

    def everyone(self, thing):
        assert not self.destroyed
        out = [None] * self.num_ranks
        dist.all_gather_object(out, thing, group=self.group)
        return out

    def check(self, x):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == self.hidden
        assert x.shape[1] % 256 == 0  # 32 lanes of 16 bytes

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        expert_alignment=1,
        num_sms=0,
        handle=None,
    ):
        self.check(x)
        assert 0 < len(x) <= self.num_max_tokens_per_rank
        if handle is not None:
            assert topk_idx is None and topk_weights is None and num_sms == handle.num_sms > 0
            tokens = torch.cat(self.everyone(x))
            return tokens[handle.origin], None, None, handle, None
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32 and expert_alignment == 1
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape == (len(x), self.num_topk)
        parts = self.everyone((x, topk_idx, topk_weights))
        tokens, ids, weights = (torch.cat(column) for column in zip(*parts, strict=True))
        e = num_experts // self.num_ranks
        local = ids - self.rank_idx * e
        local = torch.where((local >= 0) & (local < e) & (ids >= 0), local, -1)
        starts = torch.tensor([0, *(len(part[0]) for part in parts)]).cumsum(0).tolist()
        origin = [  # by source rank, shuffled within each
            start + torch.randperm(end - start, generator=SHUFFLE) for start, end in pairwise(starts)
        ]
        origin = torch.cat([at[(local[at] >= 0).any(1)] for at in origin])
        source = torch.cat(
            [torch.arange(len(part[0])) + i * self.num_max_tokens_per_rank for i, part in enumerate(parts)]
        )
        counts = torch.tensor([int((local == i).sum()) for i in range(e)])
        metadata = torch.full((len(origin), 2 + self.num_topk), -7, dtype=torch.int32)
        metadata[:, 0] = source[origin].int()
        handle = SimpleNamespace(
            num_sms=24,
            topk_idx=topk_idx.clone(),
            num_experts=num_experts,
            num_recv_tokens_per_expert_list=counts.tolist(),
            psum_num_recv_tokens_per_expert=counts.cumsum(0).int(),
            recv_src_metadata=metadata,
            origin=origin,
            span=(starts[self.rank_idx], starts[self.rank_idx + 1]),
            n_tokens=len(tokens),
        )
        return tokens[origin], local[origin], weights[origin], handle, None

    def combine(self, x, handle, topk_weights=None):
        self.check(x)
        assert len(x) == len(handle.origin)
        mine = torch.zeros(handle.n_tokens, self.hidden).index_copy(0, handle.origin, x.float())
        out = sum(part.to_dense() for part in self.everyone(mine.to_sparse()))
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.shape == (len(x), self.num_topk)
            assert topk_weights.is_contiguous()
            mine = torch.zeros(handle.n_tokens, self.num_topk).index_copy(0, handle.origin, topk_weights)
            owner = handle.topk_idx // (handle.num_experts // self.num_ranks)
            of_ranks = torch.stack(self.everyone(mine))[:, slice(*handle.span)]
            weights = torch.where(
                owner >= 0, of_ranks.gather(0, owner.clamp_min(0)[None])[0], 0.0
            )  # of the rank that holds the expert
        return out[slice(*handle.span)].bfloat16(), weights, None


SHUFFLE = torch.Generator().manual_seed(7)
