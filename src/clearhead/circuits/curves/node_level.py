"""The levels `heads` and `heads+mlps`: components of one model under one ablation, for inclusion curves (level.py).

Not here: the runs (patching/nodes.py) and the scores (rank.py) that this puts together.
"""

from collections.abc import Sequence
from typing import Self

from jaxtyping import Bool, Float64
from torch import Tensor

from clearhead.circuits.curves.level import METHODS, Method
from clearhead.circuits.curves.masks import learn_masks
from clearhead.circuits.curves.optimal import learn_constants
from clearhead.circuits.curves.rank import attribution, exact_effects, integrated_gradients, relevance
from clearhead.circuits.patching.ablation import Ablation, Replacement
from clearhead.circuits.patching.components import Components, NodeKind
from clearhead.circuits.patching.nodes import Nodes
from clearhead.data.tasks import TaskBatch
from clearhead.errors import UnknownNameError
from clearhead.model.access import Model

_PER_PROMPT = {"exact": exact_effects, "atp": attribution, "ig": integrated_gradients, "relevance": relevance}


class NodeLevel:
    """Heads, or heads and MLPs. Implements `Level`."""

    per_prompt = False

    def __init__(self, nodes: Nodes, seed: int = 0):
        self.nodes, self.seed = nodes, seed
        self.name = nodes.components.name

    @classmethod
    def open(
        cls, model: Model, kind: NodeKind, ablation: Ablation, *, reference: Sequence[TaskBatch] = (), seed: int = 0
    ) -> Self:
        """The level of a model under an ablation, whose values come from the prompts of `reference`."""
        components = Components.of(model, kind)
        constants = None
        if ablation == "optimal":
            means = Nodes(model, components, Replacement(model, components.sites, "mean", reference=reference))
            constants = learn_constants(means, reference, seed=seed)
        replacement = Replacement(
            model, components.sites, ablation, reference=reference, constants=constants, seed=seed
        )
        return cls(Nodes(model, components, replacement), seed)

    @property
    def described(self) -> str:
        """Which prompts the values of dropped components come from."""
        return self.nodes.replacement.described

    @property
    def notes(self) -> list[str]:
        """What is recomputed and what is no component."""
        rest = "embedding and norms" if self.name == "heads+mlps" else "embedding, norms and MLPs"
        notes = [f"kept components are recomputed; {rest} belong to every circuit"]
        model = self.nodes.model
        if model.n_kv_heads < model.n_heads:
            notes.append(
                f"a head is a query head (its z): {model.n_heads} share {model.n_kv_heads} key and value heads"
            )
        if model.gates is not None:
            notes.append("the edge gates of the model are recomputed in every run")
        return notes

    def count(self, rows: TaskBatch) -> int:  # noqa: ARG002 every prompt has the same
        """Number of components."""
        return len(self.nodes.components)

    def names(self, rows: TaskBatch) -> list[str]:  # noqa: ARG002
        """The components' unit ids."""
        return self.nodes.components.names

    def scores(self, method: Method, batches: Sequence[TaskBatch]) -> list[Float64[Tensor, "b n"]]:
        """See rank.py; a learned mask is one for all prompts. Raises `UnknownNameError` for another method."""
        if method == "mask":
            log_odds = learn_masks(self.nodes, batches, seed=self.seed)
            return [log_odds.expand(len(rows.items), -1) for rows in batches]
        if method not in _PER_PROMPT:
            raise UnknownNameError("ranking", method, METHODS)
        return [_PER_PROMPT[method](self.nodes, rows) for rows in batches]

    def evaluate(self, keep: Bool[Tensor, "r b n"], rows: TaskBatch) -> Float64[Tensor, "r b m"]:
        """Every metric of r circuits on each prompt."""
        return self.nodes.evaluate(keep, rows)
