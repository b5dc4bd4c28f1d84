"""clearhead: makes the attention of a pretrained causal language model readable.

Names are loaded on first use, so `import clearhead` costs milliseconds and loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.dictionaries.clt import Clt
    from clearhead.dictionaries.lorsa import Lorsa
    from clearhead.dictionaries.sae import Sae
    from clearhead.dictionaries.transcoder import Transcoder
    from clearhead.model.access import Model, Run
    from clearhead.units.graph import Graph
    from clearhead.units.unit import Unit

__version__ = "0.1.0"
__all__ = ["Clt", "Graph", "Lorsa", "Model", "Run", "Sae", "Transcoder", "Unit", "__version__"]

_HOMES = {
    "Clt": "clearhead.dictionaries.clt",
    "Graph": "clearhead.units.graph",
    "Lorsa": "clearhead.dictionaries.lorsa",
    "Model": "clearhead.model.access",
    "Run": "clearhead.model.access",
    "Sae": "clearhead.dictionaries.sae",
    "Transcoder": "clearhead.dictionaries.transcoder",
    "Unit": "clearhead.units.unit",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
