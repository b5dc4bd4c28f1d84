"""Load a dictionary of whatever kind its files say: Lorsa, transcoder, SAE or cross-layer transcoder."""

from pathlib import Path

from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.dictionary import kind_of
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import UnknownNameError

Dictionary = Lorsa | Transcoder | Sae | Clt
KINDS = {"lorsa": Lorsa, "transcoder": Transcoder, "sae": Sae, "clt": Clt}
"""The class of every kind, in the name it has in config.json and as a folder of a run."""


def load_dictionary_of(name: str | Path) -> Dictionary:
    """The dictionary in a folder (its own, or that of the run that trained it) or under a hub id.

    Raises `ClearheadError` when nothing is there, `CorruptFileError` when a file is damaged, `UnknownNameError` for a
    kind that does not exist.
    """
    folder = Path(name)
    for kind in KINDS:
        if (folder / kind / "config.json").is_file():
            folder = folder / kind
            name = folder
    kind = kind_of(name)
    if kind not in KINDS:
        raise UnknownNameError("kind of dictionary", kind, KINDS)
    return KINDS[kind].from_pretrained(name)
