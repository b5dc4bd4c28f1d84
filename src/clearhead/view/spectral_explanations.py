"""What the numbers of the spectral lens mean, in plain words; the page shows them behind every `?`.

Notation: A_ik and B_jk are what mode k of a head reads in query i and key j, so that the score is Σ_k A_ik·B_jk; c_k is
mode k's contribution to the score of the key looked at, less its mean over the other visible keys (arXiv 2602.13524).
"""

from collections.abc import Set
from dataclasses import dataclass

from clearhead.view.figures import AMBER

EXPLANATIONS: dict[str, str] = {
    "verdict": (
        "What the numbers say about this head, by fixed rules in a fixed order; each rule stands beside its name."
    ),
    "heads": (
        "Query heads whose query–key product was decomposed. Those that fire on other tokens than the first are "
        "measured."
    ),
    "sparsity": (
        "S = (mean |c|)² / mean c² over the contributions of all r modes: how few of them make up a firing. 1/r for "
        "one mode alone, 1 for equal ones. Products of Gaussians give (2/π)² = 0.41 with a flat spectrum, less with a "
        "steep one: (2/π)² (mean σ)² / mean σ². That is where a head without structure stands; it does not start near "
        "1. Low is sparse. Mean over the head's firings."
    ),
    "n_recon": (
        "Fewest modes, largest first, whose contributions add up to the whole relative score. Cancellation makes it "
        "small even for random bases, because the sum is reached before the negative terms come: read it beside the "
        "cancellation and a control."
    ),
    "cancellation": (
        "Σ|c| / |Σc|: 1 where all contributions have the same sign; 3 where the negative ones are half of the "
        "positive ones. Median over firings."
    ),
    "largest_rank": (
        "Which mode contributes most, by its place in the spectrum: 0 % is the mode of the largest singular value, "
        "100 % that of the smallest. Median over firings."
    ),
    "firings": (
        "A head fires where one key receives more than the threshold of a query's attention. Firings on the first "
        "token (sinks) are counted apart and left out of all numbers. The count is of all firings; statistics are of "
        "those kept, a random sample of at most 128 per head."
    ),
    "sinks": (
        "Firings on the first token, where attention parks when a head has nothing to do. They say little about what "
        "the head looks for, so they are shown apart and left out of all numbers."
    ),
    "rank": (
        "Singular values of the head's query–key product above rounding. Modes whose singular value is too close to a"
        " neighbour's are degenerate: only the plane they span means something, not each direction."
    ),
    "energy": (
        "Mean square of what the head's directions read in the tokens, for tokens of unit size: 1 is what random "
        "directions catch. Near 0, no text constrains the modes."
    ),
    "controls": (
        "The same statistic where it should mean nothing. Dots are the mean S under each control, lines the 95 % "
        "interval of the difference (prompts resampled); the vertical line is the head itself. Separated means "
        "clearly to the right of it. The dotted line is the S of products of Gaussians with the head's spectrum, that "
        "of its unrotated product. q is the corrected share of draws as sparse as the head, and needs 1,000 draws."
    ),
    "spectrum": (
        "Singular values of the query–key product, largest first, on a logarithmic axis. Marked modes carry most of "
        "the contributions, a larger mark a larger share. The largest singular value is often not the mode that "
        "decides. In a basis by offset the line is the unrotated product's, and a mark stands at the mode's mean "
        "singular value over the firings."
    ),
    "modes": (
        "The modes that carry most of the head's contributions. A query that holds the left direction looks at keys "
        "that hold the right one; each is described by the embeddings nearest to it. σ: the mode's singular value, in "
        "a basis by offset its mean over the head's firings. Share: of all absolute contributions over the firings."
    ),
    "direction": (
        "A direction has no sign of its own. “Along”: in most firings the query holds the direction the tokens "
        "describe; “against”: it holds its opposite, so read the tokens as what it is not."
    ),
    "basis": (
        "With rotary positions, each firing is seen in the modes of the query–key product at its own offset between "
        "query and key. Modes of one number share a place in the spectrum, not a direction or its sign, so no token "
        "describes them. σ of a mode is the mean over the head's firings; the spectrum is that of the unrotated "
        "product."
    ),
    "contributions": (
        "What each mode adds to the score of the key looked at, compared with the other visible keys. Blue bars above"
        " the line add, hatched red bars below it subtract; grey is the sum of all other modes."
    ),
    "relative": "Score of the key looked at minus the mean score of the other visible keys: the sum of the bars.",
    "score": "Score of the pair before soft-cap and position bias: the sum over all modes of A·B.",
    "attention": "Attention weight of the key looked at.",
    "previous": "Mean attention to the token before, over the texts.",
    "duplicate": "Mean attention to the earlier copy of the query's token, on random tokens said twice.",
    "induction": "Mean attention to what followed the earlier copy, on random tokens said twice.",
    "sink": "Mean attention to the first token, over the texts.",
    "behaviour": "Four simple things a head may do, as mean attention. Independent of the modes.",
    "map": (
        "One cell per head: layers from top to bottom. Arrow keys move, Enter opens the head; a layer opens its own "
        "view."
    ),
    "heads_against_control": (
        "Each point is a head: its mean S against the mean S under the gauge control, another basis of the same head "
        "that keeps every score. Below the line the head's own modes are the sparser basis. Choose a point to open "
        "it."
    ),
    "n_recon_histogram": (
        "How many modes make up the relative score, of the firings kept: at most 128 of each head, sinks left out."
    ),
    "n_recon_kept": (
        "Fewest modes, largest first, whose contributions add up to the whole relative score: the median of the "
        "firings kept, at most 128 of each head. Cancellation makes it small even for random bases."
    ),
    "separated": (
        "Share of heads whose S is below both rotated bases (gauge and span): corrected p at most 0.05 and an "
        "interval above 0. Only heads with enough firings on tokens other than the first, and a q for both bases, are "
        "judged."
    ),
    "shared": (
        "How much of what two heads of the layer read they have in common: mean squared cosine of the principal "
        "angles, 1 for the same space. Two random spaces of these sizes have the value called random. Heads that "
        "share one key projection (grouped-query attention) read the same keys by construction."
    ),
    "clusters": (
        "Modes that read nearly the same pair of directions as a mode of another head (both cosines at least one "
        "half), and how many would by chance: after rotating every head's modes within what it reads."
    ),
}

CONTROLS: dict[str, str] = {
    "gauge": "another basis of the same head: every score stays, only the choice of axes is lost",
    "span": "the spectrum and both spaces stay, their pairing is lost; no null for a fixed basis with rotary positions",
    "subspace": "random directions of the residual stream with the head's spectrum",
    "shuffle": "the query meets the key of another firing of the head, in a basis by offset one of equal offset",
    "untrained": "the same pairs in the same architecture with initial weights",
}
"""What each control keeps and loses, in the order shown; a control not listed here is shown under its own name."""

JUDGED_BY = ("gauge", "span")
"""The controls that a verdict needs, each with a q: the two rotated bases."""


@dataclass(frozen=True)
class VerdictStyle:
    """How a verdict is drawn: a mark, so that colour is never alone; a colour, none for heads without a measurement."""

    mark: str
    colour: str | None
    meaning: str


SEPARATED, CANCELLING, NOT_SEPARATED = "sparse, separated", "sparse but cancelling", "not separated"
TOO_FEW = "too few firings"
_BLUE, _SLATE, _VIOLET = "#3f83d9", "#b4bdc9", "#9b84d6"

VERDICTS: dict[str, VerdictStyle] = {
    SEPARATED: VerdictStyle(
        "●", _BLUE, "S is below both rotated bases, and few modes add up to the score without cancelling."
    ),
    CANCELLING: VerdictStyle(
        "◐", AMBER, "S is below both rotated bases, but negative contributions are at least half of the positive ones."
    ),
    NOT_SEPARATED: VerdictStyle(
        "○",
        _SLATE,
        "Tested against both rotated bases, S is not clearly below each of them: nothing says that the head's own "
        "modes are better than others.",
    ),
    "sink": VerdictStyle("▾", _VIOLET, "Most firings are on the first token, and too few others are left to judge."),
    "no token energy": VerdictStyle(
        "□", _SLATE, "The head's directions catch under 1 % of what random directions catch in the tokens."
    ),
    "not compared": VerdictStyle(
        "?",
        _SLATE,
        "Sparsity cannot be judged: one of the rotated bases (gauge and span) is missing or has fewer than the 1,000 "
        "draws that a q needs. A fixed basis with rotary positions has no span, nor has a head of lower rank.",
    ),
    TOO_FEW: VerdictStyle("·", None, "Fewer than 5 firings to measure, or firings of fewer than 5 texts."),
    "no firings": VerdictStyle("", None, "No key ever received more than the threshold of attention."),
    "no query–key product": VerdictStyle("×", None, "All singular values are zero."),
}
"""The verdicts of `spectral.verdicts`, strongest first; the page needs them without loading torch."""

JUDGED = (SEPARATED, CANCELLING, NOT_SEPARATED)
OTHER = VerdictStyle("◇", "#7fb3a6", "")
"""For a verdict this list does not have."""


def order_controls(names: Set[str]) -> list[str]:
    """Known controls in the order of `CONTROLS`, then others by name."""
    return [name for name in CONTROLS if name in names] + sorted(names - set(CONTROLS))
