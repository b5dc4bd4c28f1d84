import pytest

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.sites import LAYER_SITES, Site, expand, parse


def test_parse_names_and_layers():
    assert parse("attn_in.3", 6) == Site("attn_in", 3)
    assert parse("z.-1", 6) == Site("z", 5)
    assert parse("logits", 6) == Site("logits")
    for name in LAYER_SITES:
        assert str(parse(f"{name}.0", 1)) == f"{name}.0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attnin.3", "did you mean 'attn_in'"),
        ("patterns.0", "did you mean 'pattern'"),
        ("z", "type 'z.0' to 'z.5'"),
        ("z.6", "layers 0 to 5"),
        ("z.-7", "layers 0 to 5"),
        ("z.one", "whole number"),
        ("logits.3", "type 'logits'"),
    ],
)
def test_parse_refuses_and_says_what_to_type(text, said):
    with pytest.raises(ClearheadError, match=said):
        parse(text, 6)


def test_expand_wildcards_in_order_and_once():
    sites = expand(["z.1", "z.*", Site("embed"), "z.-1"], 3)
    assert [str(site) for site in sites] == ["z.1", "z.0", "z.2", "embed"]


def test_expand_refuses_a_single_string_and_unknown_wildcards():
    with pytest.raises(ClearheadError, match=r"type \['logits'\]"):
        expand("logits", 3)
    with pytest.raises(UnknownNameError, match="did you mean 'scores'"):
        expand(["score.*"], 3)
    with pytest.raises(UnknownNameError):
        expand(["logits.*"], 3)


def test_transformer_lens_names_are_aliases_where_the_tensor_is_the_same():
    same = {
        "hook_resid_pre": "resid_pre",
        "attn.hook_rot_q": "q",
        "attn.hook_q": "q_pre",
        "attn.hook_v": "v",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "z",
        "attn.hook_result": "head_out",
        "hook_attn_out": "attn_out",
    }
    for theirs, ours in same.items():
        assert parse(f"blocks.2.{theirs}", 6) == Site(ours, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blocks.2.ln1.hook_normalized", "before the norm's gain.*attn_in"),
        ("blocks.2.attn.hook_attn_scores", "-inf"),
        ("blocks.2.hook_mlp_in", "before the norm"),
        ("blocks.2.hook_attn_in", "before the norm"),
        ("hook_embed", "resid_pre.0"),
        ("blocks.2.attn.hook_patern", "did you mean 'blocks.0.attn.hook_pattern'"),
        ("blocks.7.attn.hook_pattern", "layers 0 to 5"),
        ("hook_resid_pre", "unknown TransformerLens name"),
    ],
)
def test_other_transformer_lens_names_are_refused_with_the_difference(text, said):
    with pytest.raises(ClearheadError, match=said):
        parse(text, 6)


def test_outputs_before_a_following_norm_are_no_alias():
    assert parse("blocks.1.hook_attn_out", 6) == Site("attn_out", 1)
    with pytest.raises(ClearheadError, match="after the norm that follows"):
        parse("blocks.1.hook_attn_out", 6, post_norms=True)
