"""What one unit of an attention layer does to the next token, at many tokens for the price of a few forwards.

A unit that writes z w_o into the layer's output is set to another value: its write there changes by

    change = (becomes − z) w_o     ablate: becomes 0     patch: its value elsewhere, or its mean     steer: factor · z

and a family changes by the sum over its members. Everything else is the model's own. Nothing is put in the layer's
place: the change is added to what the model's attention wrote, so a head of a dictionary is removed as far as the
dictionary says it is there, and its error stays. Each case is one (token, change), measured at that token alone:

    effect   change of the logits along a reader u, such as mean W_U of the tokens that the unit raises most less mean
             W_U of those that it lowers most:  (n(x′) − n(x)) · u,  x the last stream, n the final norm
    direct   what reaches the reader without another layer, norm scale held:  change · u · scale(x)
    linear   the same through the later layers' attention to this token, patterns and scales held, MLPs silent
    gradient   to first order through everything:  change · d effect / d(the layer's output), one backward for all
             changes of a case, at the unchanged forward
    loss     change of −log p(next token), nats           kl   KL(unchanged ‖ changed), nats

Cases at different tokens share a row: at every later layer a query sees the unchanged keys and values of all other
tokens, and its own changed ones, which is what it would see if its case were the only one. So a block of t tokens
measures t cases at once, exactly; what a change does to later tokens is not measured here (patch.py, tracing/steer.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.norms import Norm, logit_softcap
from clearhead.model.run import Edit, Run
from clearhead.spectral.writes import Parts

TOKENS_AT_ONCE = 2048
"""Tokens in one forward."""
TOKENS_WITH_GRADIENT = 512
"""Tokens in one forward whose activations are kept for the backward pass."""
LOGITS_AT_ONCE = 2**24
"""Logits whose probabilities are compared at a time."""


@dataclass(frozen=True, eq=False)
class Effects:
    """What the changes of m cases did, in the shape in which they were given; see the module's formulas."""

    effect: Float[Tensor, "*k m"]
    direct: Float[Tensor, "*k m"]
    linear: Float[Tensor, "*k m"]
    gradient: Float[Tensor, "*k m"]
    loss: Float[Tensor, "*k m"]
    kl: Float[Tensor, "*k m"]


@dataclass(frozen=True, eq=False)
class Unchanged:
    """One block's forward as it is: what all of its cases share."""

    tokens: Int[Tensor, "1 t"]
    stream: Float[Tensor, "1 t d"]
    """What the layer receives."""
    output: Float[Tensor, "1 t d"]
    """The layer's attention output."""
    last: Float[Tensor, "t d"]
    """The stream behind the last layer."""
    keys: dict[int, Float[Tensor, "1 g t dh"]]
    """Of the layers above."""
    values: dict[int, Float[Tensor, "1 g t dv"]]
    own: dict[int, Float[Tensor, "h t"]]
    """Attention of each token to itself, with the scales of both norms in it."""
    log_p: Float[Tensor, "t v"]
    logits: Float[Tensor, "t v"]
    """Before any soft-cap."""


def reader(W_U: Float[Tensor, "d v"], raised: Int[Tensor, "n k"], lowered: Int[Tensor, "n k"]) -> Float[Tensor, "n d"]:
    """Mean unembedding of the tokens that each unit raises less that of those that it lowers (`analysis.logits`)."""
    columns = W_U.detach().T
    return columns[raised].mean(1) - columns[lowered].mean(1)


class EffectMeter:
    """Measures cases in one layer of a model.

    Raises `ClearheadError` for a layer without attention, models with edge gates (which keys are let through depends
    on all of them), and layers above whose values are not linear in their input.
    """

    def __init__(self, model: Model, layer: int):
        if model.gates is not None:
            raise ClearheadError(f"{model.name} has edge gates, so tokens of one row cannot be changed independently")
        self.model, self.layer = model, layer
        self.parts = Parts(model)
        if not 0 <= layer < model.n_layers:
            raise ClearheadError(f"there is no layer {layer}: {model.name} has {model.n_layers}")
        self.above = range(layer + 1, model.n_layers)
        normed = [above for above in self.above if self.parts.layers[above].geometry.v_norm is not None]
        if normed:
            raise ClearheadError(f"layer {normed[0]} of {model.name} normalises its values; nothing is linear there")
        self._last = f"resid_post.{model.n_layers - 1}"
        self._W_U = self.parts.unembedding[0].detach()

    @torch.no_grad()
    def open(self, tokens: Int[Tensor, " t"]) -> Unchanged:
        """The forward that cases of this block are compared with."""
        layer, sites = self.layer, ["resid_pre", "k", "v", "pattern"]
        behind = [above for above in self.above if self.parts.layers[above].behind_attention is not None]
        reads = [f"{site}.{above}" for above in self.above for site in sites]
        reads += [f"resid_pre.{layer}", f"attn_out.{layer}", self._last, *(f"attn_out.{above}" for above in behind)]
        run = self.model.run(tokens[None], read=reads, path="eager")
        last = run[self._last][0].to(self.parts.dtype)
        logits = self.parts.final_norm.normalise(last) @ self._W_U + self.parts.unembedding[1].detach()
        return Unchanged(
            run.tokens,
            run[f"resid_pre.{layer}"],
            run[f"attn_out.{layer}"],
            last,
            {above: run[f"k.{above}"] for above in self.above},
            {above: run[f"v.{above}"] for above in self.above},
            {above: self._own(run, above) for above in self.above},
            self._capped(logits).log_softmax(-1),
            logits,
        )

    @torch.no_grad()
    def measure(
        self,
        block: Unchanged,
        position: Int[Tensor, " m"],
        change: Float[Tensor, "*k m d"],
        readers: Float[Tensor, "m d"],
    ) -> Effects:
        """What changes of the layer's attention output do, each alone at the position of its case in the block.

        Several changes of one case (leading dimensions of `change`) share its position, its reader and one backward.
        Positions may repeat; the block is run as often as the most frequent one comes. Raises `ClearheadError` for
        positions outside the block or at its last token, whose next one is not known, `NonFiniteError` for an effect
        that is no number.
        """
        t, device = block.tokens.shape[1], self.model.device
        position, change = position.to(device), change.to(device, self.parts.dtype)
        readers = readers.to(device, self.parts.dtype)
        if not len(position) == change.shape[-2] == len(readers) or not len(position):
            raise ClearheadError(f"expected as many positions as changes and readers, got {len(position)}")
        if int(position.min()) < 0 or int(position.max()) >= t - 1:
            raise ClearheadError(f"cases lie at positions 0 to {t - 2} of a block of {t} tokens")
        gradient = (change * self._gradients(block, position, readers)).sum(-1)
        shape = change.shape[:-1]
        change = change.reshape(-1, change.shape[-1])
        repeats = len(change) // len(position)
        position, readers = position.repeat(repeats), readers.repeat(repeats, 1)
        stream = torch.empty(len(position), block.last.shape[1], dtype=self.parts.dtype, device=device)
        for here, row, stop in _forwards(position, TOKENS_AT_ONCE // t):
            added = change.new_zeros(int(row.max()) + 1, stop, change.shape[1])
            added[row, position[here]] = change[here]
            stream[here] = self._forward(block, added)[row, position[here]]
        norm, before = self.parts.final_norm, block.last[position]
        shift = norm.normalise(stream) - norm.normalise(before)
        scale = norm.frozen_scale(before)[:, 0]
        written = self._enter(block, position, change)
        loss, kl = self._divergence(block, position, shift)
        found = Effects(
            (shift * readers).sum(1).view(shape),
            ((norm.centre(written) * readers).sum(1) * scale).view(shape),
            ((norm.centre(self._carry(block, position, written)) * readers).sum(1) * scale).view(shape),
            gradient,
            loss.view(shape),
            kl.view(shape),
        )
        if not all(bool(values.isfinite().all()) for values in vars(found).values()):
            raise NonFiniteError("a change led to logits that are not finite; set units to values nearer to their own")
        return found

    @torch.enable_grad()
    def _gradients(
        self, block: Unchanged, position: Int[Tensor, " m"], readers: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m d"]:
        """Of each reader with respect to the layer's output at its position: a backward for each row of cases."""
        found = torch.empty_like(readers)
        for here, row, stop in _forwards(position, TOKENS_WITH_GRADIENT // block.tokens.shape[1]):
            added = readers.new_zeros(int(row.max()) + 1, stop, block.output.shape[2]).requires_grad_()
            stream = self._forward(block, added, grad=True)[row, position[here]]
            read = (self.parts.final_norm.normalise(stream) * readers[here]).sum()
            found[here] = torch.autograd.grad(read, added)[0][row, position[here]]
        return found

    def into_stream(self, write: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Writes of the layer as they enter the stream, but for the scale of a norm behind it, which tokens set."""
        norm = self.parts.layers[self.layer].behind_attention
        return (write if norm is None else _through(norm, write)) * self.parts.multiplier

    def _forward(
        self, block: Unchanged, added: Float[Tensor, "r t d"], *, grad: bool = False
    ) -> Float[Tensor, "r t d"]:
        """The last stream when every position is changed and sees the others unchanged."""
        rows, t, _ = added.shape
        output = (block.output[:, :t] + added).to(block.output.dtype)
        edit: dict[str, Edit] = {f"attn_out.{self.layer}": output}
        for above in self.above:
            edit |= self._alone(above, block.keys[above][:, :, :t], block.values[above][:, :, :t])
        run = self.model.run(
            block.tokens[:, :t].expand(rows, -1),
            read=[self._last],
            edit=edit,
            grad=grad,
            path="eager",
            begin=(self.layer, block.stream[:, :t]),
        )
        return run[self._last].to(self.parts.dtype)

    def _alone(self, layer: int, keys: Float[Tensor, "1 g t dh"], values: Float[Tensor, "1 g t dv"]) -> dict[str, Edit]:
        """Edits of one layer: a query sees the keys and values of the unchanged block, but for its own."""
        geometry = self.parts.layers[layer].geometry
        ratio = geometry.n_heads // geometry.n_kv_heads
        held: dict[str, Tensor] = {}

        def kept(name: str, given: Tensor | None = None) -> Callable[[Tensor, Run], Tensor]:
            def keep(value: Tensor, _: Run) -> Tensor:
                held[name] = value
                return value if given is None else given.expand_as(value)

            return keep

        def score(key: Tensor) -> Float[Tensor, "r h t"]:
            products = (held["q"] * key.repeat_interleave(ratio, 1)).sum(-1) * geometry.scale
            cap = geometry.softcap
            return products if cap is None else cap * torch.tanh(products / cap)

        def scored(scores: Tensor, _: Run) -> Tensor:
            changed = scores.clone()
            changed.diagonal(dim1=-2, dim2=-1).add_((score(held["k"]) - score(keys)).to(scores.dtype))
            return changed

        def mixed(z: Tensor, _: Run) -> Tensor:
            own = held["pattern"].diagonal(dim1=-2, dim2=-1)[..., None]
            moved = own * (held["v"] - values).repeat_interleave(ratio, 1)
            return z + moved.transpose(1, 2)

        return {
            f"q.{layer}": kept("q"),
            f"k.{layer}": kept("k", keys),
            f"v.{layer}": kept("v", values),
            f"scores.{layer}": scored,
            f"pattern.{layer}": kept("pattern"),
            f"z.{layer}": mixed,
        }

    def _own(self, run: Run, layer: int) -> Float[Tensor, "h t"]:
        parts = self.parts.layers[layer]
        own = run[f"pattern.{layer}"][0].diagonal(dim1=-2, dim2=-1).to(self.parts.dtype)
        if parts.norm is not None:
            own = own * parts.norm.frozen_scale(run[f"resid_pre.{layer}"][0].to(own))[:, 0]
        if parts.behind_attention is not None:
            own = own * parts.behind_attention.frozen_scale(run[f"attn_out.{layer}"][0].to(own))[:, 0]
        return own

    def _enter(
        self, block: Unchanged, position: Int[Tensor, " m"], change: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m d"]:
        """The changes as they enter the stream, the scale of a norm behind the layer held."""
        norm = self.parts.layers[self.layer].behind_attention
        entered = self.into_stream(change)
        return entered if norm is None else entered * norm.frozen_scale(block.output[0].to(change))[position]

    def _carry(self, block: Unchanged, position: Int[Tensor, " m"], x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Through the attention of the layers above, each token's to itself, everything else held."""
        for above in self.above:
            parts = self.parts.layers[above]
            weights = parts.folded.to(self.parts.dtype, x.device)
            values = torch.einsum("md,gdv->mgv", x, weights.W_V.detach())
            values = values.repeat_interleave(len(weights.W_O) // len(weights.W_V), 1)
            moved = torch.einsum("mhv,hvd->md", values * block.own[above].T[position][..., None], weights.W_O.detach())
            if parts.behind_attention is not None:
                moved = _through(parts.behind_attention, moved)
            x = x + moved * self.parts.multiplier
        return x

    def _divergence(
        self, block: Unchanged, position: Int[Tensor, " m"], shift: Float[Tensor, "m d"]
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Loss and KL, from changes of logits rather than from two softmaxes, whose rounding would be measured."""
        gold = block.tokens[0, position + 1]
        loss, kl = shift.new_empty(len(shift)), shift.new_empty(len(shift))
        for part in torch.arange(len(shift), device=shift.device).split(max(1, LOGITS_AT_ONCE // self._W_U.shape[1])):
            moved = shift[part] @ self._W_U
            if logit_softcap(self.model) is not None:
                logits = block.logits[position[part]]
                moved = self._capped(logits + moved) - self._capped(logits)
            p = block.log_p[position[part]].exp()
            moved -= (p * moved).sum(1, keepdim=True)
            # Σ p d = 0 up to rounding, so log Σ p e^d = log(1 + Σ p (e^d − 1 − d))
            kl[part] = torch.log1p((p * (torch.expm1(moved) - moved)).sum(1))
            loss[part] = kl[part] - moved.gather(1, gold[part, None])[:, 0]
        return loss, kl

    def _capped(self, logits: Tensor) -> Tensor:
        cap = logit_softcap(self.model)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _through(norm: Norm, x: Tensor) -> Tensor:
    """A norm without its scale and bias."""
    x = norm.centre(x)
    return x if norm.gain is None else x * norm.gain.detach().to(x)


def _forwards(position: Int[Tensor, " m"], rows: int) -> Iterator[tuple[Int[Tensor, " c"], Int[Tensor, " c"], int]]:
    """Cases that share a forward of `rows` rows: which they are, the row of each, and how many tokens it needs.

    Two cases at one position lie in different rows; nothing behind the last case matters.
    """
    row, rows = _ranks(position), max(1, rows)
    for first in range(0, int(row.max()) + 1, rows):
        here = ((row >= first) & (row < first + rows)).nonzero()[:, 0]
        yield here, row[here] - first, int(position[here].max()) + 1


def _ranks(position: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
    """How many earlier cases have the same position."""
    order = position.argsort(stable=True)
    count = torch.bincount(position)
    start = (count.cumsum(0) - count)[position[order]]
    rank = torch.empty_like(position)
    rank[order] = torch.arange(len(position), device=position.device) - start
    return rank
