"""What circuits cost: every head of one prompt patched alone, and the scores of all edges, against plain passes.

The plain rows have the same edit of z, the heads of three layers in a batch (as fast as larger ones); they run all
layers and compute the logits of all positions. Ours begin at the edited layer from the cached stream and compute the
last token's logits. Both give the same logit differences, which are compared. The scores of all attention edges and
of all graph edges (attribution patching, the runs of the corrupt prompt included) stand against one forward and
backward of transformers' own model to its embeddings, weights without gradients. Passes take turns; times are CPU and
wall seconds. The prompt is random tokens: what they say changes no time.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.circuits.curves.attention_edges import AttentionEdges
from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.curves.graph_scores import score_edges
from clearhead.circuits.curves.rank import exact_effects
from clearhead.circuits.patching.ablation import Replacement
from clearhead.circuits.patching.components import Components
from clearhead.circuits.patching.nodes import Nodes
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.model.access import Model
from clearhead.model.run import Edit

TOGETHER = 3
"""Layers whose heads are patched in one plain forward."""


def time_circuits(model_name: str, *, tokens: int, repeats: int, threads: int) -> dict[str, float]:
    """Medians over repeats, and the largest difference between the effects found both ways, relative to the largest.

    The process keeps its number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = Model.load(model_name)
        rows = random_prompt(model, tokens)
        return _time_heads(model, rows, repeats) | _time_edges(model, rows, repeats)
    finally:
        torch.set_num_threads(before)


def random_prompt(model: Model, tokens: int) -> TaskBatch:
    """One item of random tokens, its corrupt prompt differing at every second position."""
    generator = torch.Generator().manual_seed(0)
    clean, other = torch.randint(model.d_vocab, (2, 1, tokens), generator=generator)
    corrupt = torch.where(torch.arange(tokens) % 2 == 0, clean, other)
    return TaskBatch([0], clean, corrupt, [[1]], [[2]], {})


def _time_heads(model: Model, rows: TaskBatch, repeats: int) -> dict[str, float]:
    components = Components.of(model, "heads")
    effects: dict[str, Tensor] = {}

    def ours() -> None:
        replacement = Replacement(model, components.sites, "corrupt")
        effects["prefix"] = exact_effects(Nodes(model, components, replacement), rows)[0]

    def plain() -> None:
        effects["plain"] = plain_effects(model, rows)

    work = {"prefix": ours, "plain": plain}
    spent = take_turns(work, repeats)
    error = float((effects["prefix"] - effects["plain"]).abs().max() / effects["plain"].abs().max())
    numbers: dict[str, float] = {"heads": len(components), "tokens": rows.clean.shape[1]}
    for clock, unit in enumerate(("CPU", "wall")):
        times = {name: [one[clock] for one in some] for name, some in spent.items()}
        numbers |= {f"head patches, {name} ({unit} s)": statistics.median(some) for name, some in times.items()}
        ratios = [slow / fast for slow, fast in zip(times["plain"], times["prefix"], strict=True)]
        numbers[f"head patches, plain / prefix ({unit})"] = statistics.median(ratios)
    return numbers | {"largest difference of the effects": error}


def _time_edges(model: Model, rows: TaskBatch, repeats: int) -> dict[str, float]:
    """Scores of all edges of one prompt against one forward and backward."""
    clean = rows.clean.to(model.device)
    parameters = [parameter for parameter in model.hf.parameters() if parameter.requires_grad]
    graph = GraphEdges(model)
    counts = {"attention": AttentionEdges(model).count(rows), "graph": graph.count(rows)}

    def plain() -> None:
        embeddings = model.hf.get_input_embeddings()(clean).detach().requires_grad_()
        logit_difference(model.hf(inputs_embeds=embeddings).logits[:, -1], rows).sum().backward()

    work: dict[str, Callable[[], object]] = {
        "plain": plain,
        "attention": lambda: AttentionEdges(model).attribution(rows),
        "graph": lambda: score_edges(graph.parts, rows, graph.replacement.values(rows)),
    }
    for parameter in parameters:
        parameter.requires_grad_(False)  # noqa: FBT003
    try:
        spent = take_turns(work, repeats)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)  # noqa: FBT003
    numbers: dict[str, float] = {}
    for clock, unit in enumerate(("CPU", "wall")):
        times = {name: [one[clock] for one in some] for name, some in spent.items()}
        numbers[f"forward + backward ({unit} s)"] = statistics.median(times["plain"])
        for kind, count in counts.items():
            ratios = [ours / base for ours, base in zip(times[kind], times["plain"], strict=True)]
            numbers[f"scores of {count} {kind} edges ({unit} s)"] = statistics.median(times[kind])
            numbers[f"scores of {kind} edges / forward + backward ({unit})"] = statistics.median(ratios)
    return numbers


@torch.no_grad()
def plain_effects(model: Model, rows: TaskBatch) -> Float[Tensor, " n"]:
    """M(all) − M(all but one head) of one prompt by plain forwards: every layer, every position's logits."""
    clean, other = rows.clean.to(model.device), model.run(rows.corrupt, read=["z.*"])
    whole = logit_difference(model.run(clean).logits[:, -1], rows)
    found = []
    heads = torch.eye(model.n_heads, dtype=torch.bool, device=model.device)
    for start in range(0, len(model.attention_layers), TOGETHER):
        layers = model.attention_layers[start : start + TOGETHER]
        count = len(layers) * model.n_heads
        edits: dict[str, Edit] = {}
        for place, layer in enumerate(layers):
            own = torch.zeros(count, model.n_heads, dtype=torch.bool, device=model.device)
            own[place * model.n_heads : (place + 1) * model.n_heads] = heads
            edits[f"z.{layer}"] = _overwriting(own[:, None, :, None], other[f"z.{layer}"])
        run = model.run(clean.expand(count, -1), edit=edits)
        repeated = rows._replace(answers=rows.answers * count, wrong_answers=rows.wrong_answers * count)
        found.append(whole - logit_difference(run.logits[:, -1], repeated))
    return torch.cat(found).double()


def _overwriting(own: Tensor, value: Tensor) -> Edit:
    return lambda z, _run: torch.where(own, value, z)


def take_turns(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of each piece of work, `repeats` times in turn."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, act in work.items():
            cpu, wall = time.process_time(), time.perf_counter()
            act()
            spent[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return spent
