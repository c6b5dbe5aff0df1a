"""What a model is: one frozen dataclass, and the published models as values of it."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

Norm = Literal["pre", "post", "peri"]
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of one Mixture-of-Experts language model.

    The first ``n_dense_layers`` layers have a dense feed-forward of hidden size ``d_dense``; every other
    layer has ``n_experts`` experts of hidden size ``d_expert`` and, where ``d_shared`` is not 0, a shared
    expert. All feed-forwards are SwiGLU without bias.

    Raises
    ------
    ValueError
        When the sizes do not describe a model (see the message), at construction.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_dense_layers: int = 0
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_dense: int = 0
    n_experts: int
    top_k: int
    d_expert: int
    d_shared: int = 0
    max_seq_len: int = 8192  # positions in the RoPE table
    rope_base: float = 5e5
    norm: Norm = "pre"  # pre: x + f(norm(x)); post: x + norm(f(x)); peri: x + norm(f(norm(x)))
    norm_eps: float = 1e-5
    qk_norm: QKNorm = "head"  # RMSNorm of queries and keys: per head, over the full width, or none
    normalize_embedding: bool = False  # scale embeddings by sqrt(d_model), then RMSNorm them
    tied_head: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: Literal["none", "l1"] = "l1"  # of the k chosen scores
    route_scale: float = 1.0  # multiplies the combine weights
    n_groups: int = 1  # group-limited routing: experts form this many groups ...
    top_groups: int = 1  # ... of which a token may use this many
    init_std: float = 0.02
    # The training objective, in the units of the mean cross-entropy (nats per token).
    balance_weight: float = 0.0
    balance_population: Literal["document", "rank", "micro_batch", "batch"] = "document"
    balance_groups: int | None = None  # of neighbouring experts, as those of a rank, in place of each expert
    router_z_weight: float = 0.0
    head_z_weight: float = 0.0

    def __post_init__(self) -> None:
        positive = "vocab_size d_model n_layers n_heads n_kv_heads d_head max_seq_len".split()
        if self.n_dense_layers < self.n_layers:
            positive += ["n_experts", "top_k", "d_expert"]
        if self.n_dense_layers > 0:
            positive.append("d_dense")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig needs {name} >= 1, got {getattr(self, name)}")
        if self.d_shared < 0:
            raise ValueError(f"ModelConfig needs d_shared >= 0, got {self.d_shared}")
        for name in ("init_std", "balance_weight", "router_z_weight", "head_z_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"ModelConfig needs a finite {name} >= 0, got {getattr(self, name)}")
        for name in ("norm_eps", "rope_base", "route_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"ModelConfig needs a finite {name} > 0, got {getattr(self, name)}")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise ValueError(
                "ModelConfig needs 0 <= n_dense_layers <= n_layers, "
                f"got n_dense_layers={self.n_dense_layers}, n_layers={self.n_layers}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"ModelConfig needs n_kv_heads to divide n_heads, got {self.n_kv_heads} and {self.n_heads}"
            )
        if self.d_head % 2:
            raise ValueError(f"ModelConfig needs an even d_head (RoPE turns pairs), got {self.d_head}")
        for name, allowed in (
            ("norm", ("pre", "post", "peri")),
            ("qk_norm", ("none", "head", "full")),
            ("score", ("softmax", "sigmoid")),
            ("normalize", ("none", "l1")),
            ("balance_population", ("document", "rank", "micro_batch", "batch")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"ModelConfig needs {name} in {allowed}, got {getattr(self, name)!r}")
        if self.n_dense_layers < self.n_layers and self.top_k > self.n_experts:
            raise ValueError(f"ModelConfig needs top_k <= n_experts, got {self.top_k} of {self.n_experts}")

        if self.balance_groups is not None and (
            self.balance_groups < 1 or self.n_experts % self.balance_groups
        ):
            raise ValueError(
                f"ModelConfig needs balance_groups that divides n_experts={self.n_experts}, got "
                f"{self.balance_groups}"
            )
        if self.n_dense_layers < self.n_layers and (
            self.n_groups < 1
            or self.n_experts % self.n_groups
            or not 1 <= self.top_groups <= self.n_groups
            or self.top_k > self.n_experts // self.n_groups * self.top_groups
        ):
            raise ValueError(
                "ModelConfig needs n_groups to divide n_experts, 1 <= top_groups <= n_groups and top_k "
                f"experts in them, got n_experts={self.n_experts}, n_groups={self.n_groups}, "
                f"top_groups={self.top_groups}, top_k={self.top_k}"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` has experts."""
        return layer >= self.n_dense_layers

    @property
    def n_moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.n_layers - self.n_dense_layers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of a model's layers, and whether the embedding stands before it and the head behind it."""

    layers: range
    embeds: bool
    heads: bool  # the last norm, the head and the cross-entropy

    @staticmethod
    def whole(config: ModelConfig) -> "Stage":
        """Return the whole model as one stage."""
        return Stage(layers=range(config.n_layers), embeds=True, heads=True)

    def has(self, name: str, config: ModelConfig) -> bool:
        """Say whether the stage reads the parameter of a dotted name; a tied head reads the embedding."""
        unit, _, rest = name.partition(".")
        if unit == "layers":
            return int(rest.partition(".")[0]) in self.layers
        if unit in ("norm", "head"):
            return self.heads
        return self.embeds or (unit == "embedding" and self.heads and config.tied_head)


def _published(
    n_layers,
    n_dense_layers,
    d_model,
    n_heads,
    n_kv_heads,
    n_experts,
    d_expert,
    *,
    norm: Norm = "peri",
    **rest,
):
    """One row of the OLMo-core 3 report; what every row shares is written here once."""
    shared: dict[str, Any] = dict(
        vocab_size=100_352,
        d_head=128,
        d_dense=5 * d_expert,
        d_shared=d_expert,
        top_k=4,
        route_scale=4.0,
        normalize_embedding=True,
        init_std=0.01,
        head_z_weight=1e-4,
        router_z_weight=2e-4,
    )
    return ModelConfig(
        n_layers=n_layers,
        n_dense_layers=n_dense_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_experts=n_experts,
        d_expert=d_expert,
        norm=norm,
        **(shared | rest),
    )


PRESETS: dict[str, ModelConfig] = {
    "tiny": _published(16, 1, 2048, 16, 4, 64, 2048, balance_weight=0.01),
    "small": _published(32, 1, 2560, 24, 6, 64, 2560, balance_weight=0.01),
    "medium": _published(39, 2, 3072, 32, 8, 64, 3072, balance_weight=0.005),
    "large": _published(47, 2, 4096, 40, 10, 128, 4096, balance_weight=0.005),
    "ultra-128": _published(63, 2, 6144, 64, 32, 128, 8192, balance_weight=0.005),
    "ultra-256": _published(63, 2, 6144, 64, 32, 256, 8192, balance_weight=0.005),
    "bench-8L": _published(
        8, 1, 4096, 32, 8, 128, 4096, norm="post", balance_weight=0.015, router_z_weight=1e-4
    ),
}
"""Models of the OLMo-core 3 report. ``medium`` was published with 64, 96 and 128 experts, ``bench-8L`` with
8, 32, 48, 64 and 128: ``preset(name, n_experts=...)``."""


def preset(name: str, **changes) -> ModelConfig:
    """Return a published model by name, with fields replaced.

    >>> preset("bench-8L", n_experts=8).n_moe_layers
    7

    Raises
    ------
    ValueError
        When no preset has this name, or the changed sizes do not describe a model.
    """
    if name not in PRESETS:
        raise ValueError(f"preset needs one of {sorted(PRESETS)}, got {name!r}")
    return replace(PRESETS[name], **changes)


def toy(config: ModelConfig, *, n_layers: int = 8, n_experts: int = 8) -> ModelConfig:
    """Return a model of the same kind, norms, routing and dense layers, whose widths fit a laptop.

    >>> toy(preset("ultra-128")).d_model
    64
    """
    return replace(
        config,
        vocab_size=512,
        d_model=64,
        n_layers=n_layers,
        n_dense_layers=min(config.n_dense_layers, n_layers),
        n_heads=4,
        n_kv_heads=max(4 * config.n_kv_heads // config.n_heads, 1),
        d_head=16,
        n_experts=n_experts,
        top_k=min(config.top_k, n_experts),
        d_dense=320,
        d_expert=64,
        d_shared=64 if config.d_shared else 0,
        init_std=0.06,
    )
