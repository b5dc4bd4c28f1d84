import pytest

from clearhead.analysis.neighbours import Neighbourhood
from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from tests.model.tiny_configs import build

LAYER = 1


@pytest.fixture(scope="module")
def model():
    return Model(build("gpt2").requires_grad_(False), None, name="gpt2", self_test=False)


def place(kind, reads, writes, name="gpt2", width=32):
    config = TranscoderConfig(d_in=width, d_out=width, n_features=4, k=2)
    return kind(config, {"model": name, "input_site": reads, "output_site": writes})


def heads(layer, width=32):
    config = LorsaConfig(d_model=width, n_heads=2, n_groups=1, d_qk=2, k=1)
    sites = {"input_site": f"attn_in.{layer}", "output_site": f"attn_out.{layer}"}
    return Lorsa(config, {"model": "gpt2"} | sites)


@pytest.mark.parametrize(
    ("made", "roles"),
    [
        (place(Transcoder, "mlp_in.0", "mlp_out.0"), "writer"),
        (place(Transcoder, "mlp_in.1", "mlp_out.1"), "reader"),
        (place(Sae, "resid_pre.1", "resid_pre.1"), "writer"),
        (place(Sae, "resid_mid.1", "resid_mid.1"), "reader"),
        (place(Sae, "resid_post.0", "resid_post.0"), "writer"),
        (place(Sae, "resid_post.1", "resid_post.1"), "reader"),
        (place(Sae, "attn_in.1", "attn_in.1"), "writer"),
        (place(Sae, "attn_in.0", "attn_in.0"), ""),
        (place(Sae, "attn_out.1", "attn_out.1"), "twin"),
        (place(Sae, "attn_out.0", "attn_out.0"), "writer"),
        (place(Sae, "mlp_out.1", "mlp_out.1"), ""),
        (heads(0), "writer"),
        (heads(1), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else value.provenance["output_site"],
)
def test_the_order_in_the_stream_says_who_meets_whom(model, made, roles):
    found = Neighbourhood(model, LAYER, {"it": made}, strict=False)
    names = {"writer": found.writers, "reader": found.readers, "twin": found.twins}
    assert "".join(name for name, neighbours in names.items() if neighbours) == roles


def test_in_parallel_blocks_the_mlp_reads_before_the_heads_write():
    model = Model(build("gptj").requires_grad_(False), None, name="gpt2", self_test=False)
    own = Neighbourhood(model, 0, {"it": place(Transcoder, "mlp_in.0", "mlp_out.0")}, strict=False)
    assert not own.neighbours
    next_one = Neighbourhood(model, 0, {"it": place(Transcoder, "mlp_in.1", "mlp_out.1")})
    assert len(next_one.readers) == 1


def test_dictionaries_that_do_not_belong_are_refused_by_name(model):
    def refuse(message, **made):
        with pytest.raises(ClearheadError, match=message):
            Neighbourhood(model, LAYER, made)

    below = place(Transcoder, "mlp_in.0", "mlp_out.0")
    refuse("^one was trained on other, and the heads", one=place(Transcoder, "mlp_in.0", "mlp_out.0", "other"))
    refuse(f"^one reads mlp_out.1 .* meets no head of attention {LAYER}", one=place(Sae, "mlp_out.1", "mlp_out.1"))
    refuse("^one, a sae, has the input_site None", one=place(Sae, None, None))
    refuse("^one, a sae, has the input_site q.0", one=place(Sae, "q.0", "q.0"))
    refuse("^one and two both stand at mlp_in.0", one=below, two=below)
    refuse("^one, a lorsa, reads 33 numbers, and", one=heads(0, 33))
    refuse("^one, a transcoder, reads 8 numbers", one=place(Transcoder, "mlp_in.0", "mlp_out.0", width=8))
    clt = Clt(CltConfig(d_model=32, n_layers=2, n_features=4, k=2), {"model": "gpt2"})
    refuse("^one writes to many layers", one=clt)
