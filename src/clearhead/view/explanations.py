"""What each number on a page means, in one or two sentences with its formula; the page shows them behind every `?`.

Notation: token i reads from tokens j ≤ i; Lorsa head h of QK group g has rank-one value v_h,j, output direction w_o,
and attention A_g (arXiv 2504.20938, section 3); m runs over the original heads of the same layer.
"""

EXPLANATIONS: dict[str, str] = {
    "rate": "Share of the held-out tokens analysed on which this unit is active: n_active / n_tokens.",
    "n_active": "Number of the held-out tokens analysed on which this unit is active.",
    "mean_activation": "Mean activation over the tokens where the unit is active; zeros are left out.",
    "max_activation": "Largest activation on the held-out text. Token backgrounds are scaled to it.",
    "decoder_norm": "Length of the output vector, |w_o|. The unit adds z·w_o to the layer's output.",
    "dead": (
        "Never active on the held-out tokens analysed. The summary's share of dead units counts those never active on "
        "the tokens evaluated, usually more of them; both numbers of tokens stand in the summary."
    ),
    "participation": (
        "Over how many original heads the unit spreads: 1 / Σ p², where p is its share of each original head "
        "(p sums to 1). 1 means one head; the number of heads means all equally."
    ),
    "spanning": "Output participation of 2 or more, or a second share of at least half the first.",
    "host": "The original head with the largest share of this unit's output.",
    "logit": "Largest direct effect on a logit: max over the vocabulary of w_o · W_U (final norm folded in).",
    "logits": (
        "Direct effect of one unit of activation on the logits: w_o · W_U, with the final norm's gain folded into "
        "W_U and later layers left out. Ten largest and ten smallest."
    ),
    "activation": "The unit's activation at the marked token.",
    "z_pattern": (
        "Where the activation comes from: z = Σ_j A_ij·v_j is an exact sum over source tokens j. Blue adds, red "
        "subtracts; percentages are |A_ij·v_j| / Σ_j |A_ij·v_j|, with the sign in front. Terms below 1 % of the "
        "sum are added up as “other tokens”."
    ),
    "row_sum": "Sum of all contributions A_ij·v_j of this token: the pre-activation before the activation function.",
    "top": "The tokens of the held-out text with the largest activations.",
    "quantile": "Random active tokens, one from each of several equal bands, strongest first: the usual case.",
    "negative": "Random tokens on which the unit is not active, for comparison.",
    "histogram": "Held-out tokens by activation, active tokens only, in 40 equal bins; logarithmic counts.",
    "shares": (
        "How much of this unit each original head m accounts for. Output: p = relu(c) / Σ relu(c) with c the mean over "
        "active tokens of (A_m x W_V W_O)·w_o/|w_o|. Weights: w_v W_V W_O w_oᵀ / (|w_v| |w_o| |W_V W_O|), no data. "
        "Routing: mean over tokens of Σ_j min(A_h,ij, A_m,ij), the overlap of the two patterns."
    ),
    "group": "Units of one QK group share W_Q and W_K, so they look at the same tokens; each has its own v and w_o.",
    "fvu": "Fraction of variance unexplained: Σ|y − ŷ|² / Σ|y − ȳ|² on held-out text, position 0 left out. 0 is exact.",
    "explained_variance": "1 − variance of the error / variance of y: like 1 − FVU, but a constant error is forgiven.",
    "l0": "Mean number of active units per token.",
    "dead_share": (
        "Share of units never active on the held-out tokens evaluated. A unit is marked dead in the list by the tokens "
        "analysed (“Dead among tokens analysed”); both numbers of tokens stand below."
    ),
    "over_dense_share": "Share of units active on more than a tenth of the held-out tokens evaluated.",
    "ce_clean": "Cross-entropy of the untouched model on held-out text, nats per token.",
    "ce_replaced": "Cross-entropy when the layer's attention output is replaced by the reconstruction, nats per token.",
    "ce_zero": "Cross-entropy when the layer's attention output is set to zero, nats per token.",
    "ce_mean": "Cross-entropy when the layer's attention output is set to its mean, nats per token.",
    "ce_recovered": "(CE zero − CE replaced) / (CE zero − CE clean): 100 % means no loss from the replacement.",
    "ce_recovered_over_mean": "(CE mean − CE replaced) / (CE mean − CE clean): the same against mean ablation.",
    "kl_replaced": "KL divergence from the clean to the replaced model's next-token distribution, nats per token.",
    "relative_error_position_0": "|y − ŷ| / |y| at position 0, which all other numbers leave out.",
    "spanning_output": "Share of units spread over several original heads (output shares), with its 95 % interval.",
    "spanning_weights": "The same by the weights formula.",
    "spanning_routing": "The same by the routing formula.",
    "spanning_output_shuffled": "Control: output shares with the write vectors exchanged between units at random.",
    "analysed_tokens": "Held-out tokens from which the units' rates, examples and shares were taken.",
    "analysed_dead_share": "Share of units never active on the tokens analysed: those that the list marks dead.",
    "error_by_position": (
        "Error at each position of the context: √(Σ|y − ŷ|² / Σ|y|²) over the held-out blocks. Position 0 is shown but "
        "left out of the FVU."
    ),
    "rates": "How many units are active how often; dead units are counted in the leftmost bar.",
    "cross_entropy": "Loss of the model with this layer's attention output left alone, replaced, zeroed or averaged.",
    "hosts": "Units by the original head with the largest output share. Choose a bar to list them.",
    "explanations": (
        "What an explainer said of this unit from some of its examples, and how well a judge who knew only these words "
        "did on others: balanced accuracy, 0.5 is chance, with its 95 % interval. Detection: which texts activate it? "
        "Fuzzing: is the marked token the one it fires on? Intruder: which example does not belong?"
    ),
    "behaviours": (
        "Scores of the detectors of docs/concepts/lorsa.md. The mark is the threshold, fixed on planted cases before "
        "any model was looked at. Where a behaviour is found, the case that shows it best: the query underlined, the "
        "tokens it reads on a ground."
    ),
    "family": (
        "Units whose source tokens are nearly the same: pieces of rank one of what may be one behaviour. Overlap: mean "
        "over common queries of Σ_j min(D_j, D'_j), D a unit's source tokens by |A v|. Dimensions: participation ratio "
        "of the members' read (write) vectors."
    ),
    "family_overlap": "Mean overlap of the members' source tokens with those of the family's first; 1 means the same.",
    "family_rank": "Participation ratio of the members' unit vectors, stacked: how many dimensions they span.",
    "relation_reads": (
        "What its value vector w_v finds, where it beats chance: token embeddings as the layer receives them, by how "
        "much larger v is there than at the average token; features and heads of earlier layers, by v per unit of "
        "their activation."
    ),
    "relation_writes": (
        "What its write vector w_o moves, where it beats chance: pre-activations of features and values of heads of "
        "later layers, per unit of its activation; for an SAE of the same output the cosine of the two vectors."
    ),
    "relation_query": (
        "Tokens over-represented among those that look, by the share of the strongest examples (the tip has the lift "
        "over the base rate); and, where scores were split exactly, what each unit gives the query's side."
    ),
    "relation_key": (
        "Distances and tokens over-represented among the keys that matter (up to 3 largest |A v| of each example), by "
        "their share; and, where scores were split exactly, what each unit gives the key's side."
    ),
    "relation_modes": (
        "Singular modes u_m σ_m v_m of the query-key product of its host head, by |u_m Ω v_m| / |Ω|, Ω the product of "
        "this unit's own QK group."
    ),
    "trust": "Each number with its 95 % interval where it has one; the number of cases it rests on is in its tip.",
    "seed_stability": (
        "Likeness to its partner in a Lorsa of another seed: correlation of activations times cosine of writes. 1 is "
        "the same head; from 0.5 it counts as stable."
    ),
    "explained": "Squared correlation of its activation with what the layer's output holds along w_o, where active.",
    "explained_alone": "The same with all other heads of the Lorsa taken out of the output.",
    "host_share": "Share of the original head that makes most of its output; the interval is over stretches of text.",
    "causal_effect": (
        "Logits of the 10 tokens it raises most less those of the 10 it lowers most: how far they fall when what it "
        "writes is taken out of the model at a token where it is active. Later layers compute anew."
    ),
    "gradient_effect": (
        "The same to first order: what it writes times the gradient of these logits through all later layers. Far from "
        "the measured effect where the change is too large for its first order."
    ),
    "predicted_effect": "The same by weights alone: z w_o on the logits, no later layer, the final norm's scale held.",
    "linear_effect": "The prediction with what attention of later layers carries to the same token.",
    "causal_loss": "Change of the loss of the next token when it is removed.",
    "causal_kl": "KL divergence of the model's prediction from the one without it, nats.",
    "control_effect": "The effect on the same logits of removing another head that is active at the same token.",
    "control_loss": "Change of the loss for a random direction of the same length.",
    "control_kl": "KL divergence for a random direction of the same length: what any change of that size does.",
    "effect_slope": "Slope of the measured on the direct effect over its cases; 1 where later layers change nothing.",
    "effect_correlation": "Correlation of the measured and the direct effect over its cases.",
    "pattern_rank": (
        "A score is a sum over coordinates (planes of the rotation): so many of them, the most important first, keep "
        "95 % of the variance of its activation. All of them: its pattern cannot be had from a smaller product."
    ),
    "pattern_overlap": "Mean of Σ_j min(A_ij, A'_ij) with the nearest pattern of its group; below 0.8 it is its own.",
    "map": "Each point is a unit: how often it is active against its largest activation. Choose a point to open it.",
}

METRIC_NAMES: dict[str, str] = {
    "fvu": "FVU",
    "l0": "L0",
    "dead_share": "Dead",
    "ce_recovered": "CE recovered",
    "kl_replaced": "KL",
    "spanning_output": "Spanning",
    "explained_variance": "Explained variance",
    "over_dense_share": "Over-dense",
    "ce_clean": "CE clean",
    "ce_replaced": "CE replaced",
    "ce_mean": "CE mean-ablated",
    "ce_zero": "CE zero-ablated",
    "ce_recovered_over_mean": "CE recovered over mean",
    "relative_error_position_0": "Relative error at position 0",
    "spanning_weights": "Spanning by weights",
    "spanning_routing": "Spanning by routing",
    "spanning_output_shuffled": "Spanning, shuffled control",
    "tokens": "Tokens evaluated",
    "downstream_tokens": "Tokens of the loss",
    "analysed_tokens": "Tokens analysed",
    "analysed_dead_share": "Dead among tokens analysed",
    "dead_heads": "Dead, number",
    "over_dense_heads": "Over-dense, number",
}
"""Names of metrics as the page writes them, in its order; other metrics follow under their own names."""

HEADLINES = ("fvu", "l0", "dead_share", "ce_recovered", "kl_replaced", "spanning_output")
"""Metrics shown large."""
