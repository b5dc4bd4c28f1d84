"""The grammar of sites: names of the places in a model where a tensor can be read and written.

A site is `name` or `name.layer`: `logits`, `attn_in.12`, `z.-1` (counted from the last layer), and in patterns
`attn_in.*` (every layer). Shapes (b batch, t position, q/k query/key position, h head, g kv head, dh head width,
d model width, v vocabulary):

| site | shape | the tensor |
|---|---|---|
| embed | b t d | output of the token embedding, before positions are added |
| resid_pre, resid_post | b t d | what the layer receives, what it returns |
| attn_in, mlp_in | b t d | what the module receives: after the norm, its gain included |
| q_pre, k_pre | b h t dh, b g t dh | the projections' outputs, before QK norm, rotation and any scaling |
| q, k, v | b h t dh, b g t dh, b g t dv | what the attention function receives: after QK norm and rotation |
| scores | b h q k | what enters softmax: scaled, soft-capped, with position biases and the mask added |
| sink | b h q | the extra logit that enters softmax beside the scores, where the model has one |
| pattern | b h q k | what leaves softmax; the sink's share is left out, so that with a sink rows sum to less than 1 |
| z | b t h dv | what the attention function returns: pattern · v |
| head_out | b t h d | each head's share of attn_out: its slice of the output projection's input times its W_O |
| attn_out, mlp_out | b t d | the module's output, before any norm that follows it; the residual stream not added |
| resid_mid | b t d | the residual stream between attention and MLP; parallel blocks have none |
| logits | b t v | the model's output |

Masked scores hold what transformers puts there (the dtype's minimum, not -inf), and where a family subtracts each
row's maximum before softmax (gpt_oss) so do its scores and sinks: softmax of what is read is always the pattern.
Most families compute softmax in float32 whatever the model's dtype, and their pattern is then float32. Hidden positions
(padding) hold numbers without meaning. A TransformerLens name is accepted
where it names the same values (`blocks.3.attn.hook_rot_q` is `q.3`); any other raises and says what differs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from clearhead.errors import ClearheadError, UnknownNameError

GLOBAL_SITES = ("embed", "logits")
LAYER_SITES = (
    "resid_pre",
    "attn_in",
    "q_pre",
    "k_pre",
    "q",
    "k",
    "v",
    "scores",
    "sink",
    "pattern",
    "z",
    "head_out",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "mlp_out",
    "resid_post",
)
SITES = (*GLOBAL_SITES, *LAYER_SITES)

SOFTMAX_SITES = frozenset({"scores", "sink", "pattern"})
"""Sites that exist only where the pattern is computed: reading or editing one puts the run on the eager path."""
FUNCTION_SITES = SOFTMAX_SITES | {"q", "k", "v", "z"}
"""What enters and leaves the attention function."""
ATTENTION_SITES = FUNCTION_SITES | {"attn_in", "q_pre", "k_pre", "head_out", "attn_out"}
"""Sites that exist only in layers with softmax attention."""

_ALIASES = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "attn.hook_q": "q_pre",
    "attn.hook_k": "k_pre",
    "attn.hook_v": "v",
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "attn.hook_pattern": "pattern",
    "attn.hook_z": "z",
    "attn.hook_result": "head_out",
}
_AFTER_NORM = ("hook_attn_out", "hook_mlp_out")
_BEFORE_NORM = "it is the residual stream copied per head, before the norm. Use resid_pre, or attn_in after the norm"
_DIFFERENT = {
    "ln1.hook_normalized": "it lies before the norm's gain (attn_in after it; the two agree only in folded weights)."
    " Use attn_in",
    "ln2.hook_normalized": "it lies before the norm's gain (mlp_in after it; the two agree only in folded weights)."
    " Use mlp_in",
    "ln1.hook_scale": "norm scales are not a site. Use resid_pre and compute the scale",
    "ln2.hook_scale": "norm scales are not a site. Use resid_mid and compute the scale",
    "attn.hook_attn_scores": "it holds -inf where masked, transformers' scores the dtype's minimum. Use scores",
    "hook_attn_in": _BEFORE_NORM,
    "hook_q_input": _BEFORE_NORM,
    "hook_k_input": _BEFORE_NORM,
    "hook_v_input": _BEFORE_NORM,
    "hook_mlp_in": "it lies before the norm. Use resid_mid, or mlp_in after the norm",
    "mlp.hook_pre": "MLP neurons are not a site. Use mlp_in or mlp_out",
    "mlp.hook_post": "MLP neurons are not a site. Use mlp_in or mlp_out",
    "hook_embed": "it holds any scaling of the embeddings, embed may not. Use embed or resid_pre.0",
    "hook_pos_embed": "position embeddings are not a site. Use embed and resid_pre.0",
    "ln_final.hook_normalized": "the final norm is not a site. Use the last resid_post",
    "ln_final.hook_scale": "the final norm is not a site. Use the last resid_post",
}


@dataclass(frozen=True, order=True)
class Site:
    """One place: its name, and its layer unless it is `embed` or `logits`."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}.{self.layer}"


def parse(text: str, n_layers: int, *, post_norms: bool = False) -> Site:
    """The site that `text` names in a model of `n_layers` layers.

    `post_norms` says that the model normalises a module's output before adding it to the residual stream, where
    TransformerLens' `hook_attn_out` and `hook_mlp_out` are other tensors than `attn_out` and `mlp_out`.

    Raises `UnknownNameError` with the nearest name, `ClearheadError` for a layer that is missing or out of range, and
    for a TransformerLens name whose tensor differs.
    """
    if "hook_" in text:
        return _parse_alias(text, n_layers, post_norms)
    name, dot, layer = text.partition(".")
    if name not in SITES:
        raise UnknownNameError("site", text, SITES)
    if name in GLOBAL_SITES:
        if dot:
            raise ClearheadError(f"site {text!r}: {name} belongs to no layer; type {name!r}")
        return Site(name)
    if not dot:
        raise ClearheadError(f"site {text!r} needs a layer: type '{name}.0' to '{name}.{n_layers - 1}', or '{name}.*'")
    if not re.fullmatch(r"-?\d+", layer):
        raise ClearheadError(f"site {text!r}: the layer must be a whole number, as in '{name}.0', or '*'")
    return Site(name, _resolve_layer(text, int(layer), n_layers))


def expand(patterns: Iterable[str | Site], n_layers: int, *, post_norms: bool = False) -> list[Site]:
    """The sites that the patterns name, in the order given, each once; `name.*` stands for every layer.

    Raises as `parse` does. A single string is refused: it would be read letter by letter.
    """
    if isinstance(patterns, str):
        raise ClearheadError(f"expected a list of sites, got the string {patterns!r}; type [{patterns!r}]")
    sites: dict[Site, None] = {}
    for pattern in patterns:
        text = str(pattern)
        if text.endswith(".*"):
            name = text.removesuffix(".*")
            if name not in LAYER_SITES:
                raise UnknownNameError("site of layers", name, LAYER_SITES)
            sites.update(dict.fromkeys(Site(name, layer) for layer in range(n_layers)))
        else:
            sites[parse(text, n_layers, post_norms=post_norms)] = None
    return list(sites)


def _resolve_layer(text: str, layer: int, n_layers: int) -> int:
    """`layer` counted from the front."""
    if not -n_layers <= layer < n_layers:
        raise ClearheadError(f"site {text!r}: the model has layers 0 to {n_layers - 1} (or -{n_layers} to -1)")
    return layer % n_layers


def _parse_alias(text: str, n_layers: int, post_norms: bool) -> Site:
    """A TransformerLens name: our site where the values are the same, else an error that says what differs."""
    match = re.fullmatch(r"(?:blocks\.(-?\d+)\.)?(.+)", text)
    layer, name = match.groups() if match else (None, text)
    if name in _DIFFERENT:
        raise ClearheadError(f"TransformerLens' {text!r} is no site here: {_DIFFERENT[name]}.")
    if name not in _ALIASES or layer is None:
        known = [f"blocks.0.{alias}" for alias in _ALIASES]
        raise UnknownNameError("TransformerLens name", text, known, f"Our own names are {', '.join(SITES)}.")
    if post_norms and name in _AFTER_NORM:
        raise ClearheadError(
            f"TransformerLens' {text!r} is no site here: in this model it lies after the norm that follows the module,"
            f" {_ALIASES[name]} before it. Use {_ALIASES[name]}.{layer}."
        )
    return Site(_ALIASES[name], _resolve_layer(text, int(layer), n_layers))
