"""The model under study: load it, read and edit its sites, leave it as it was found."""

from clearhead.model.access import Model
from clearhead.model.run import Run
from clearhead.model.self_test import SelfTestError
from clearhead.model.sites import Site

__all__ = ["Model", "Run", "SelfTestError", "Site"]
