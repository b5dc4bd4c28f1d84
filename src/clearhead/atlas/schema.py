"""The tables of an atlas: which columns, of which type, meaning what.

An atlas is a directory with one parquet file per table and `atlas.json`, which holds the schema version and where
the numbers come from. Every lens writes these tables and every page reads them. `docs/reference/atlas-schema.md`
says the same in prose and is tested against this file.

A change that an older reader would misread raises `SCHEMA_VERSION`; a reader refuses versions newer than its own.
"""

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 4

_text, _int, _float, _double, _bool = pa.string(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()
_effect = pa.struct([pa.field("token", _text), pa.field("token_id", _int), pa.field("logit", _float)])


@dataclass(frozen=True)
class Column:
    """One column: its parquet type, its meaning, and whether a row may leave it empty."""

    name: str
    type: pa.DataType
    meaning: str
    optional: bool = False


TABLES: dict[str, tuple[Column, ...]] = {
    "units": (
        Column("unit_id", _text, "name of the unit, `lorsa.12.345`; unique"),
        Column("kind", _text, "`lorsa`, `head`, and what later lenses add"),
        Column("layer", _int, "layer of the model", optional=True),
        Column("index", _int, "number of the unit within its kind and layer", optional=True),
        Column(
            "group",
            _int,
            "number of the attention pattern that the unit shares: its QK group, unless groups form several",
            optional=True,
        ),
        Column("n_tokens", _int, "tokens the unit was evaluated on", optional=True),
        Column("n_active", _int, "of these, tokens on which its activation is not 0", optional=True),
        Column("rate", _double, "n_active / n_tokens", optional=True),
        Column("mean_activation", _float, "mean activation over active tokens; empty for a dead unit", optional=True),
        Column("max_activation", _float, "activation of largest magnitude; empty for a dead unit", optional=True),
        Column("dead", _bool, "never active on the evaluated tokens", optional=True),
        Column("histogram", pa.list_(_int), "active tokens per activation bin, 40 bins", optional=True),
        Column("histogram_edges", pa.list_(_float), "the 41 edges of the bins", optional=True),
        Column(
            "decoder_norm", _float, "length of the write vector (of its matrix for an original head)", optional=True
        ),
        Column("raised", pa.list_(_effect), "the 10 logits raised most per unit of activation", optional=True),
        Column("lowered", pa.list_(_effect), "the 10 logits lowered most per unit of activation", optional=True),
        Column("share_output", pa.list_(_float), "share over the layer's original heads, by output", optional=True),
        Column("share_weights", pa.list_(_float), "the same by weights alone", optional=True),
        Column("share_routing", pa.list_(_float), "the same by overlap of attention patterns", optional=True),
        Column("participation_output", _float, "1 / Σ share_output², number of heads spanned", optional=True),
        Column("participation_weights", _float, "1 / Σ share_weights²", optional=True),
        Column("participation_routing", _float, "1 / Σ share_routing²", optional=True),
    ),
    "examples": (
        Column("example_id", _int, "number of the example; unique"),
        Column("unit_id", _text, "unit the example is of"),
        Column("category", _text, "`top`, `quantile` or `negative`"),
        Column("rank", _int, "place within the category: 0 is the strongest"),
        Column("activation", _float, "activation of the unit at `position`"),
        Column("document", _text, "title of the text"),
        Column("block", _int, "token block the example comes from"),
        Column("position", _int, "place of the activating token in its block"),
        Column("start", _int, "place in the block of the first token shown"),
        Column("tokens", pa.list_(_text), "tokens shown; bytes that are not UTF-8 as \\xNN"),
        Column("token_ids", pa.list_(_int), "their vocabulary entries"),
        Column("activations", pa.list_(_float), "activation of the unit at each token shown"),
    ),
    "patterns": (
        Column("example_id", _int, "example the row belongs to"),
        Column("unit_id", _text, "unit the row belongs to"),
        Column("query", _int, "place of the activating token among the tokens shown"),
        Column("keys", pa.list_(_int), "places in the block of the source tokens kept"),
        Column("weights", pa.list_(_float), "A_ij v_j of each source token kept"),
        Column("rest", _float, "sum of A_ij v_j over the source tokens left out"),
        Column("row_sum", _float, "sum of A_ij v_j over all source tokens: the pre-activation"),
    ),
    "graphs": (
        Column("graph_id", _text, "name of the graph; unique"),
        Column("provenance", _text, "JSON: model, prompt, token ids, protocol, versions, seed, parents"),
        Column("units", pa.list_(_text), "names of the units"),
        Column("activation", pa.list_(_double), "activation of each unit; an element may be empty"),
        Column("source", pa.list_(_int), "place in `units` of each edge's source"),
        Column("target", pa.list_(_int), "place in `units` of each edge's target"),
        Column("weight", pa.list_(_double), "signed weight of each edge"),
    ),
    "layers": (
        Column("layer", _int, "layer of the model"),
        Column("kind", _text, "kind of unit the layer was decomposed into"),
        Column("metric", _text, "name of the number: `fvu`, `l0`, `ce_clean`, `spanning_output`, ..."),
        Column("value", _double, "the number"),
    ),
    "prompts": (
        Column("prompt", _int, "number of the text; unique"),
        Column("name", _text, "title of the text, or name of the task's template"),
        Column("tokens", pa.list_(_text), "its tokens; bytes that are not UTF-8 as \\xNN"),
        Column("token_ids", pa.list_(_int), "their vocabulary entries"),
    ),
    "spectra": (
        Column("layer", _int, "layer of the model"),
        Column("head", _int, "query head"),
        Column("verdict", _text, "what the numbers of this row and of `controls` say in words"),
        Column("n_firings", _int, "firings measured: attention above the threshold, not on a sink"),
        Column("n_sink", _int, "firings on a sink (the first token), counted apart and left out of the numbers below"),
        Column("sparsity", _double, "mean S of the relative contributions; empty without firings", optional=True),
        Column("n_recon", _double, "median N_recon", optional=True),
        Column("cancellation", _double, "median of sum |c| / |sum c|", optional=True),
        Column("largest_rank", _double, "median place of the largest mode, 0 for the largest sigma", optional=True),
        Column("energy_query", _double, "mean square of what the head's query directions read; 1 for random ones"),
        Column("energy_key", _double, "the same of its key directions"),
        Column("previous", _float, "mean attention to the token before"),
        Column("duplicate", _float, "mean attention to earlier copies, on repeated random tokens"),
        Column("induction", _float, "mean attention to what followed the copy, on repeated random tokens"),
        Column("sink", _float, "mean attention to the first token"),
        Column("rank", _int, "singular values above rounding"),
        Column("degenerate", _int, "modes too close to a neighbour to be told apart"),
        Column("error", _double, "largest error of the decomposition, relative to the largest singular value"),
        Column("sigma", pa.list_(_float), "singular values, descending"),
    ),
    "controls": (
        Column("layer", _int, "layer of the model"),
        Column("head", _int, "query head"),
        Column("control", _text, "`gauge`, `span`, `subspace`, `shuffle` or `untrained`"),
        Column("draws", _int, "random draws (seeds for `untrained`)"),
        Column("sparsity", _double, "mean S under the control"),
        Column("n_recon", _double, "median N_recon under the control"),
        Column("effect", _double, "mean over firings of S under the control minus S"),
        Column("low", _double, "lower end of its 95 % interval, prompts resampled"),
        Column("high", _double, "upper end"),
        Column("p", _double, "share of draws whose pooled S is as low as the head's", optional=True),
        Column("q", _double, "p corrected for the number of heads (Benjamini and Hochberg)", optional=True),
    ),
    "firings": (
        Column("layer", _int, "layer of the model"),
        Column("head", _int, "query head"),
        Column("prompt", _int, "text of table `prompts`"),
        Column("query", _int, "place of the query token"),
        Column("key", _int, "place of the key token"),
        Column("sink", _bool, "the key is the first token"),
        Column("attention", _float, "attention weight"),
        Column("score", _float, "sum of the contributions: the score before soft-cap and ALiBi"),
        Column("relative", _float, "score minus the mean of the other visible keys' scores"),
        Column("sparsity", _float, "S of the relative contributions"),
        Column("n_recon", _int, "fewest modes that reach the relative score"),
        Column("cancellation", _float, "sum |c| / |sum c|"),
        Column("largest_rank", _float, "place of the largest mode, 0 for the largest sigma, 1 for the smallest"),
        Column("modes", pa.list_(_int), "the modes that contribute most, by size"),
        Column("contributions", pa.list_(_float), "their relative contributions, signed"),
        Column("query_side", pa.list_(_float), "what each of these modes reads in the query (A)"),
        Column("rest", _float, "sum of the other modes' contributions"),
    ),
    "modes": (
        Column("unit_id", _text, "name of the mode, `mode.5.3.0`; unique"),
        Column("layer", _int, "layer of the model"),
        Column("head", _int, "query head"),
        Column("mode", _int, "number of the mode, 0 for the largest singular value"),
        Column("sigma", _float, "singular value"),
        Column("degenerate", _bool, "too close to a neighbour for its single vectors to mean something"),
        Column("share", _float, "share of the head's absolute contributions over all firings"),
        Column(
            "query_tokens",
            pa.list_(_effect),
            "embeddings nearer to the query direction than chance allows; `logit` is the cosine",
        ),
        Column("key_tokens", pa.list_(_effect), "the same for the key direction; empty in bases by offset"),
    ),
    "shared_modes": (
        Column("layer", _int, "layer of the model"),
        Column("side", _text, "`query` or `key`"),
        Column("head_a", _int, "one query head"),
        Column("head_b", _int, "another query head of the layer"),
        Column("overlap", _double, "mean squared cosine of the principal angles between what the two heads read"),
        Column("random", _double, "the same for two random spaces of these sizes"),
    ),
    "behaviours": (
        Column("unit_id", _text, "unit that was tested"),
        Column("behaviour", _text, "name of the behaviour, `induction`, `previous_token`, ..."),
        Column("score", _double, "the detector's score"),
        Column("threshold", _double, "the score from which the behaviour counts as found, fixed on planted cases"),
        Column("found", _bool, "score is at least the threshold, on enough cases"),
        Column("cases", _int, "cases the score was measured on"),
        Column("tokens", pa.list_(_text), "tokens of the case that shows it best; empty where none does"),
        Column("query", _int, "place of the query among these tokens", optional=True),
        Column("keys", pa.list_(_int), "places of the tokens it reads there, largest contribution first"),
    ),
    "relations": (
        Column("unit_id", _text, "unit described"),
        Column(
            "relation",
            _text,
            "`reads` or `writes` (its value path), `query` or `key` (what makes it look), `modes` (of its host heads)",
        ),
        Column("rank", _int, "place within the relation; kinds of `other` take turns, largest first"),
        Column("other", _text, "what it relates to: `embedding.11`, `logit.11`, `feature.12.7`, `mode.12.3.0`, ..."),
        Column("label", _text, "that in words: the token's text, the feature's label, or empty"),
        Column("value", _double, "strength; docs/concepts/lorsa.md says of what, for each relation"),
        Column("share", _double, "share of the unit's strongest examples that hold it", optional=True),
    ),
    "families": (
        Column("family", _text, "name of the family; unique"),
        Column("layer", _int, "layer of the model"),
        Column("units", pa.list_(_text), "its members, the most active first"),
        Column("overlap", _double, "mean overlap of the members' source tokens with the family's own"),
        Column("read_rank", _double, "effective dimensions that the members' read vectors span"),
        Column("write_rank", _double, "the same for what they write"),
        Column("label", _text, "what the members have in common, in words; may be empty"),
    ),
    "trust": (
        Column("unit_id", _text, "unit measured"),
        Column(
            "measure", _text, "`seed_stability`, `causal_effect`, `gradient_effect`, `explained`, `pattern_rank`, ..."
        ),
        Column("value", _double, "the number"),
        Column("low", _double, "lower end of its 95 % interval", optional=True),
        Column("high", _double, "upper end", optional=True),
        Column("cases", _int, "tokens, prompts or seeds it rests on"),
    ),
    "interventions": (
        Column("unit_id", _text, "unit or family whose activations were set, or beside which a control was"),
        Column(
            "becomes", _text, "to what: a factor of what they were (`0` ablates, `2` doubles), `mean` or `elsewhere`"
        ),
        Column("changed", _text, "`own` activations, a `random` direction as long, or `other`: another active head's"),
        Column("effect", _double, "mean change of the logits that the unit writes to"),
        Column("low", _double, "lower end of its 95 % interval, cases resampled"),
        Column("high", _double, "upper end"),
        Column("slope", _double, "of effect on gradient over the cases, 1 where first order is all", optional=True),
        Column("direct", _double, "mean change predicted by the direct path"),
        Column("linear", _double, "the same through attention of later layers, patterns held"),
        Column("gradient", _double, "the same to first order through everything"),
        Column("loss", _double, "mean change of the next token's loss, nats"),
        Column("kl", _double, "mean KL of the next token's prediction, nats"),
        Column("cases", _int, "tokens at which it was done"),
    ),
    "explanations": (
        Column("unit_id", _text, "unit explained"),
        Column("explainer", _text, "who wrote it: `template`, or the name of a language model"),
        Column("explanation", _text, "the explanation"),
        Column(
            "scorer", _text, "`detection`, `fuzzing` or `intruder`; empty for an explanation not scored", optional=True
        ),
        Column("judge", _text, "who judged: `template`, or the name of a language model", optional=True),
        Column("score", _double, "balanced accuracy of the judge; 0.5 is chance, 0.2 for an intruder", optional=True),
        Column("low", _double, "lower end of its 95 % interval", optional=True),
        Column("high", _double, "upper end", optional=True),
        Column("cases", _int, "examples judged", optional=True),
    ),
}
"""Columns of each table, in order."""

SINCE: dict[str, int] = {
    **dict.fromkeys(("prompts", "spectra", "controls", "firings", "modes", "shared_modes"), 2),
    **dict.fromkeys(("behaviours", "relations", "families", "trust", "explanations"), 3),
    "interventions": 4,
}
"""The schema version that brought a table, where not the first; an older atlas reads as if the table were empty."""


def arrow_schema(table: str) -> pa.Schema:
    """The pyarrow schema of a table, with the schema version in its metadata."""
    fields = [pa.field(column.name, column.type, nullable=column.optional) for column in TABLES[table]]
    return pa.schema(fields, metadata={"clearhead_schema": str(SCHEMA_VERSION)})
