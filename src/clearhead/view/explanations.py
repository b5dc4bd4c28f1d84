"""What each number on a page means, in one or two sentences with its formula; the page shows them behind every `?`.

Notation: token i reads from tokens j ≤ i; Lorsa head h of QK group g has rank-one value v_h,j, output direction w_o,
and attention A_g (arXiv 2504.20938, section 3); m runs over the original heads of the same layer.
"""

EXPLANATIONS: dict[str, str] = {
    "rate": "Share of held-out tokens on which this unit is active: n_active / n_tokens.",
    "n_active": "Number of held-out tokens on which this unit is active.",
    "mean_activation": "Mean activation over the tokens where the unit is active; zeros are left out.",
    "max_activation": "Largest activation on the held-out text. Token backgrounds are scaled to it.",
    "decoder_norm": "Length of the output vector, |w_o|. The unit adds z·w_o to the layer's output.",
    "dead": "Never active on the held-out tokens that were evaluated.",
    "participation": (
        "Over how many original heads the unit spreads: 1 / Σ p², where p is its share of each original head "
        "(p sums to 1). 1 means one head; the number of heads means all equally."
    ),
    "spanning": "Participation over output shares of 2 or more: the unit is spread over several original heads.",
    "host": "The original head with the largest share of this unit's output.",
    "logit": "Largest direct effect on a logit: max over the vocabulary of w_o · W_U (final norm folded in).",
    "logits": (
        "Direct effect of one unit of activation on the logits: w_o · W_U, with the final norm's gain folded into "
        "W_U and later layers left out. Ten largest and ten smallest."
    ),
    "activation": "The unit's activation at the marked token.",
    "z_pattern": (
        "Where the activation comes from: z = Σ_j A_ij·v_j is an exact sum over source tokens j. Blue adds, red "
        "subtracts; percentages are |A_ij·v_j| / Σ_j |A_ij·v_j|, with the sign in front."
    ),
    "row_sum": "Sum of all contributions A_ij·v_j of this token: the pre-activation before the activation function.",
    "top": "The tokens of the held-out text with the largest activations.",
    "quantile": "Tokens drawn from equal slices between zero and the largest activation: what the unit usually does.",
    "negative": "Random tokens on which the unit is not active, for comparison.",
    "histogram": "Held-out tokens by activation, active tokens only, in 40 equal bins; the count axis is logarithmic.",
    "shares": (
        "How much of this unit each original head m accounts for. Output: p = relu(c) / Σ relu(c) with c the mean over "
        "active tokens of (A_m x W_V W_O)·w_o/|w_o|. Weights: w_v W_V W_O w_oᵀ / (|w_v| |w_o| |W_V W_O|), no data. "
        "Routing: mean over tokens of Σ_j min(A_h,ij, A_m,ij), the overlap of the two patterns."
    ),
    "group": "Units of one QK group share W_Q and W_K, so they look at the same tokens; each has its own v and w_o.",
    "fvu": "Fraction of variance unexplained: Σ|y − ŷ|² / Σ|y − ȳ|² on held-out text, position 0 left out. 0 is exact.",
    "explained_variance": "1 − FVU.",
    "l0": "Mean number of active units per token.",
    "dead_share": "Share of units never active on the held-out tokens.",
    "dense_share": "Share of units active on more than a tenth of the held-out tokens.",
    "ce_clean": "Cross-entropy of the untouched model on held-out text, nats per token.",
    "ce_replaced": "Cross-entropy when the layer's attention output is replaced by the reconstruction.",
    "ce_zero": "Cross-entropy when the layer's attention output is set to zero.",
    "ce_mean": "Cross-entropy when the layer's attention output is set to its mean.",
    "ce_recovered": "(CE zero − CE replaced) / (CE zero − CE clean): 1 means no loss from the replacement.",
    "kl": "KL divergence from the clean to the replaced model's next-token distribution, nats per token.",
    "spanning_share": "Share of live units spread over several original heads (participation of 2 or more).",
    "error_by_position": "Mean |y − ŷ| at each position of the context. Position 0 is shown but left out of the FVU.",
    "rates": "How many units are active how often; dead units are counted in the leftmost bar.",
    "cross_entropy": "Loss of the model with this layer's attention output left alone, replaced, zeroed or averaged.",
    "hosts": "Units by the original head with the largest output share. Choose a bar to list them.",
    "map": "Each point is a unit: how often it is active against its largest activation. Choose a point to open it.",
}

METRIC_NAMES: dict[str, str] = {
    "fvu": "FVU",
    "explained_variance": "Explained variance",
    "l0": "L0",
    "dead_share": "Dead",
    "dense_share": "Over-dense",
    "n_heads": "Units",
    "ce_clean": "CE clean",
    "ce_replaced": "CE replaced",
    "ce_zero": "CE zero-ablated",
    "ce_mean": "CE mean-ablated",
    "ce_recovered": "CE recovered",
    "kl": "KL",
    "spanning_share": "Spanning several heads",
    "spanning_share_low": "Spanning, interval low",
    "spanning_share_high": "Spanning, interval high",
}
