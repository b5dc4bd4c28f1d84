"""Scores of all graph edges from one backward: edge attribution patching, and its integrated form.

For the edge from writer u to reader r, with w_u and a_u what u writes in the clean and in the replacing run,

    eap      Σ_t (w_u − a_u) · g_r          g_r = ∂M/∂x_r through this reader alone, at the clean run
    eap-ig   Σ_t (w_u − a_u) · mean of g_r over runs whose embedding is mixed, (1 − s) clean + s replacing, at the S
             midpoints s (EAP-IG takes the grid s = 0, 1/S, ...; both converge to the same integral)

eap is the gradient of the metric with respect to the edge's mask where all edges are kept (patching/graph_patching.py).
A positive score is that of an edge that helps; EAP-IG's own files have the effect of corrupting the edge instead. The
norm before the reader enters with its exact Jacobian, or with its scale held (`frozen_scale`).

g_r is pulled back to the stream, for the readers of one place at a time, r · t · d numbers, and multiplied with what
all writers below wrote: d_head times fewer operations than pushing every write into every head, no copies of the stream
inside of the model, one forward and backward for all. (Syed et al. 2310.10348; Hanna et al. 2403.17806.)
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.patching.graph_parts import GraphParts, Readers
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.model.run import Edit, Run


def score_edges(
    parts: GraphParts,
    rows: TaskBatch,
    replacing: Mapping[str, Tensor],
    *,
    steps: int | None = None,
    frozen_scale: bool = False,
) -> Float[Tensor, "b n"]:
    """The score of every edge on each prompt: eap, or eap-ig with `steps` midpoints.

    replacing: site → what its writers hold in the replacing run (`GraphParts.sites`).
    """
    model = parts.model
    tokens = rows.clean.to(model.device)
    mixes = [0.0] if steps is None else [(step + 0.5) / steps for step in range(steps)]
    helped = None if steps is None else _helped(parts, model.run(tokens, read=parts.sites), replacing)
    total = torch.zeros(len(tokens), parts.n_edges, dtype=model.dtype, device=model.device)
    for mix in mixes:
        run, gradients = _differentiate(parts, tokens, rows, replacing["resid_pre.0"], mix)
        helped = _helped(parts, run, replacing) if helped is None else helped
        for at in parts.places:
            pulled = _pull(parts, at, run, gradients, frozen_scale=frozen_scale)
            total[:, at.start : at.stop] += (pulled.flatten(2) @ helped[:, : at.seen].mT).flatten(1)
    return total / len(mixes)


@torch.no_grad()
def _helped(parts: GraphParts, run: Run, replacing: Mapping[str, Tensor]) -> Float[Tensor, "b u td"]:
    """w_u − a_u of all writers, the positions and the width as one axis."""
    own = {site: run[site].detach() for site in parts.sites}
    other = {site: value if value.ndim else value.expand_as(own[site]) for site, value in replacing.items()}
    found = [parts.writes(site, own[site]) - parts.writes(site, other[site]) for site in parts.sites]
    return torch.cat(found, 1).flatten(2)


def _differentiate(
    parts: GraphParts, tokens: Int[Tensor, "b t"], rows: TaskBatch, other: Tensor, mix: float
) -> tuple[Run, dict[str, Tensor]]:
    """A run with a mixed embedding, and the gradients at everything that reads."""
    model, layers = parts.model, range(parts.model.n_layers)
    names = [f"{site}.{layer}" for layer in layers for site in ("q_pre", "k_pre", "v", "mlp_in")]
    names.append(f"resid_post.{model.n_layers - 1}")
    # in parallel blocks attention and MLP may receive one tensor: a copy has the MLP's gradient alone
    edits: dict[str, Edit] = {f"mlp_in.{layer}": lambda x, _run: x.clone() for layer in layers}
    if mix:
        edits["resid_pre.0"] = lambda x, _run: (1 - mix) * x + mix * other
    run = model.run(tokens, read=[*parts.read(), *names, "logits"], edit=edits, grad=True, positions=[-1])
    logits = run.logits[:, 0]
    total = logit_difference(logits.float() if logits.dtype.itemsize < 4 else logits, rows).sum()
    found = torch.autograd.grad(total, [run[name] for name in names])
    return run, dict(zip(names, found, strict=True))


@torch.no_grad()
def _pull(
    parts: GraphParts, at: Readers, run: Run, gradients: Mapping[str, Tensor], *, frozen_scale: bool
) -> Float[Tensor, "b r t d"]:
    """The gradients of a place's readers at the stream that they read."""
    if at.kind == "logits":
        x = run[f"resid_post.{at.layer - 1}"]
        names = [f"resid_post.{at.layer - 1}"]
    else:
        x = parts.stream(at.kind, at.layer, run)
        names = [f"{site}.{at.layer}" for site in (("mlp_in",) if at.kind == "mlp" else ("q_pre", "k_pre", "v"))]
    return parts.pull_back(at, x, tuple(gradients[name] for name in names), frozen_scale=frozen_scale)
