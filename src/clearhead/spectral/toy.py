"""The toy model: an autoencoder and one attention head trained together on features that are known.

    f_i = 0 with probability 1 − p, else uniform on [0, 1]                       i = 1 … n features of a token
    r = Wᵀ f                                                                     the token, d dimensions
    L_reconstruction = mean over tokens of |f − ReLU(W r + b)|²                  (Elhage et al. 2022)
    l_j = r W_Q R(j − m) W_Kᵀ s_j                                                one query r, keys s_0 … s_{m−1}
    L_attention = KL( softmax_j of target_j ‖ softmax_j of l_j ),   target_j = g_j Σ_k T_k f_k(r) f_{p+k}(s_j)
    L = L_reconstruction + λ L_attention

Pair k wants feature k in the query and feature p + k in the key. R is the identity without rotary positions; g is 1, or
falls with the distance for `rope="nearby"`. Everything is trained at once: the head never sees W as a dictionary.

Ours, where the paper (SVF, 2602.13524) is silent or was not available to us: the divergence in place of the
cross-entropy (equal gradients), Adam with a cosine schedule, and queries and keys that start at 0.3 of Xavier's size.
That last one matters: where W loses a dimension, Ω keeps its start there for ever, and raw singular vectors show it.

Not here: what is measured on a toy (toy_metrics.py) and the comparison of settings (toy_sweeps.py).
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import kl_div, relu

from clearhead.config.spectral_toy import Rope, ToySetting
from clearhead.errors import NonFiniteError
from clearhead.ops.rotation import Rotation, rotate
from clearhead.spectral.factored import Factored

QK_START = 0.3
ROPE_BASE = 10_000.0


class Losses(NamedTuple):
    """Of one batch: squared error per token, and divergence of the head from its target in nats."""

    reconstruction: Tensor
    attention: Tensor


class Toy(nn.Module):
    """Weights of the toy: W [n, d] with a feature in each row, its bias, W_Q and W_K [d, dh]."""

    def __init__(self, setting: ToySetting, generator: torch.Generator):
        super().__init__()
        n, d, dh = setting.features, setting.width, setting.head_width

        def drawn(rows: int, columns: int, size: float = 1.0) -> nn.Parameter:
            spread = size * math.sqrt(2 / (rows + columns))
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * spread)

        self.W, self.b = drawn(n, d), nn.Parameter(torch.zeros(n))
        self.W_Q, self.W_K = drawn(d, dh, QK_START), drawn(d, dh, QK_START)
        self.targets = targets(setting)
        self.falloff = falloff(setting.rope, setting.keys)
        self.turn = None if setting.rope == "off" else key_rotation(setting.keys, dh)

    def omega(self) -> Factored:
        """Ω = W_Q·W_Kᵀ, without positions, in float64."""
        return Factored(self.W_Q.detach().double(), self.W_K.detach().double())

    def forward(self, f: Float[Tensor, "b t n"]) -> Losses:
        """Losses of a batch of sequences; token 0 is the query, the others are its keys."""
        tokens = f @ self.W
        error = f - relu(tokens @ self.W.mT + self.b)
        return Losses(
            reconstruction=error.square().sum() / (f.shape[0] * f.shape[1]),
            attention=kl_div(
                self.logits(tokens).log_softmax(-1),
                self.target_logits(f).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            ),
        )

    def logits(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b k"]:
        """The head's logits for the keys 1 … of the query 0."""
        query = tokens[:, 0] @ self.W_Q
        if self.turn is None:
            return (tokens[:, 1:] @ (query @ self.W_K.mT).unsqueeze(-1)).squeeze(-1)
        keys = rotate(tokens[:, 1:] @ self.W_K, self.turn)
        return (keys @ query.unsqueeze(-1)).squeeze(-1)

    def target_logits(self, f: Float[Tensor, "b t n"]) -> Float[Tensor, "b k"]:
        """What the logits should be, up to a constant per query."""
        pairs = len(self.targets)
        wanted = f[:, 0, :pairs] * self.targets
        return (f[:, 1:, pairs : 2 * pairs] @ wanted.unsqueeze(-1)).squeeze(-1) * self.falloff


def train(
    setting: ToySetting,
    seed: int,
    watch: Callable[[int, Toy, Losses], None] | None = None,
    at: Collection[int] = (),
) -> Toy:
    """Train one toy from its seed; the same seed gives the same weights.

    `watch(step, toy, losses)` is called before each step in `at` with the losses of the batch to come, and once at the
    end with those of the last batch. Raises `NonFiniteError` when the training diverges.
    """
    generator = torch.Generator().manual_seed(seed)
    toy = Toy(setting, generator)
    optimiser = torch.optim.Adam(toy.parameters(), lr=setting.lr, fused=True)
    losses = Losses(torch.zeros(()), torch.zeros(()))
    for step in range(setting.steps):
        for group in optimiser.param_groups:
            group["lr"] = setting.lr * (1 + math.cos(math.pi * step / setting.steps)) / 2
        losses = toy(draw(generator, setting, setting.batch))
        if watch is not None and step in at:
            _check(losses, step)
            watch(step, toy, losses)
        optimiser.zero_grad(set_to_none=True)
        (losses.reconstruction + setting.attention_weight * losses.attention).backward()
        optimiser.step()
    _check(losses, setting.steps)
    if watch is not None:
        watch(setting.steps, toy, losses)
    return toy


def _check(losses: Losses, step: int) -> None:
    if not all(bool(loss.isfinite()) for loss in losses):
        raise NonFiniteError(f"the toy's loss is no longer finite at step {step}; give a smaller --lr")


def draw(generator: torch.Generator, setting: ToySetting, sequences: int) -> Float[Tensor, "b t n"]:
    """Feature values of `sequences` queries, each followed by its keys."""
    uniform = torch.rand(sequences, setting.keys + 1, setting.features, generator=generator)
    # what of one uniform number exceeds 1 − p is, divided by p, present with probability p and then uniform
    return uniform.sub_(1 - setting.density).clamp_min_(0).div_(setting.density)


def targets(setting: ToySetting) -> Float[Tensor, " p"]:
    """T_k of each pair, the strongest first."""
    return torch.linspace(1, setting.weakest_target, setting.pairs)


def falloff(rope: Rope, keys: int) -> Float[Tensor, " k"]:
    """g_j: how much of its target a key at each place has; the last key is the nearest to the query."""
    return torch.arange(1, keys + 1) / keys if rope == "nearby" else torch.ones(keys)


def key_rotation(keys: int, head_width: int) -> Rotation:
    """R(j − m) for keys j = 0 … m−1 of a query at m: only differences of positions enter a logit."""
    offsets = torch.arange(-keys, 0)[:, None]
    angles = offsets * ROPE_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    return Rotation(angles.cos(), angles.sin(), interleaved=False)
