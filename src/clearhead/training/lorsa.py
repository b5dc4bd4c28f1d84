"""What training a Lorsa adds to training any dictionary: slower queries and keys, and its own term for L0.

Queries, keys and sinks of the model's own start where they should be and need smaller steps; gates and added sinks have
yet to be learned, are numbers of size 1 where weights are of size 1 / sqrt(d), and need larger ones. For jumprelu the
sparsity term is the expected L0 with the straight-through gradient to the thresholds alone (arXiv 2407.14435), for relu
the L1 norm of the values; everything else is in dictionary_task.py.
"""

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.dictionaries.lorsa import Lorsa
from clearhead.ops.topk import active
from clearhead.training.dictionary_task import DictionaryTask, Scales

GATE_RATE = 10.0
"""Learning rate of gates and added sinks, as a multiple of that of queries and keys."""


class LorsaTask(DictionaryTask):
    """Training one Lorsa: the loop's `Task`."""

    def __init__(
        self,
        lorsa: Lorsa,
        scales: Scales,
        *,
        aux_k: int,
        aux_weight: float = 1.0,
        dead_after_tokens: int,
        qk_lr_factor: float = 1.0,
        l0_weight: float = 0.0,
        added_sinks: bool = False,
    ):
        super().__init__(lorsa, scales, aux_k=aux_k, aux_weight=aux_weight, dead_after_tokens=dead_after_tokens)
        self.lorsa = lorsa
        self.qk_lr_factor, self.l0_weight, self.added_sinks = qk_lr_factor, l0_weight, added_sinks

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Queries and keys apart from the rest: they start from the model's own and need smaller steps."""
        qk, gates = ("W_Q", "W_K", "b_Q", "b_K", "q_gain", "k_gain", "sink"), ("qk_gate",)
        if self.added_sinks:
            qk, gates = qk[:-1], ("qk_gate", "sink")
        named = list(self.lorsa.named_parameters())
        return [
            ([p for name, p in named if name in qk], self.qk_lr_factor),
            ([p for name, p in named if name in gates], self.qk_lr_factor * GATE_RATE),
            ([p for name, p in named if name not in qk + gates], 1.0),
        ]

    def _penalty(self, pre: Float[Tensor, "r n"], values: Tensor, progress: float) -> Tensor | float:  # noqa: ARG002
        if not self.l0_weight:
            return 0.0
        if self.lorsa.config.activation == "jumprelu":
            gate = active(pre, self.lorsa.log_threshold, self.lorsa.config.bandwidth)
            return self.l0_weight * gate.sum(-1).mean()
        if self.lorsa.config.activation == "relu":
            return self.l0_weight * values.sum(-1).mean()
        return 0.0
