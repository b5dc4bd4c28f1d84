"""One loader for every kind of dictionary, also from the directory of the run that trained it."""

import json

import pytest

from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError, UnknownNameError

FEATURES = TranscoderConfig(d_in=4, d_out=4, n_features=8, k=2)
MODULES = {
    "lorsa": Lorsa(LorsaConfig(d_model=4, n_heads=8, n_groups=2, d_qk=2, k=2)),
    "transcoder": Transcoder(FEATURES),
    "sae": Sae(FEATURES),
    "clt": Clt(CltConfig(d_model=4, n_layers=2, n_features=8, k=2)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_the_kind_is_read_from_the_files(kind, tmp_path):
    MODULES[kind].save_pretrained(tmp_path / kind)
    assert type(load_dictionary_of(tmp_path / kind)) is type(MODULES[kind])
    assert type(load_dictionary_of(tmp_path)) is type(MODULES[kind])


def test_other_kinds_and_empty_places_are_refused(tmp_path):
    with pytest.raises(ClearheadError, match="holds no config.json"):
        load_dictionary_of(tmp_path)
    (tmp_path / "layers" / "3").mkdir(parents=True)
    with pytest.raises(ClearheadError, match="name those wanted, as .*3"):
        load_dictionary_of(tmp_path / "layers")
    (tmp_path / "config.json").write_text(json.dumps({"kind": "transcodre"}))
    with pytest.raises(UnknownNameError, match="did you mean 'transcoder'"):
        load_dictionary_of(tmp_path)
