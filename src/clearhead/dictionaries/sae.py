"""Sparse autoencoder: a transcoder whose input and output are the same site (`resid_post.L`, `attn_out.L`, ...).

Formulas, parameters and files are those of transcoder.py; only the kind on disk and the provenance differ. Dictionaries
elsewhere subtract the decoder bias from the input first; that is folded into b_enc when they are loaded.
"""

from typing import ClassVar

from clearhead.dictionaries.transcoder import Transcoder


class Sae(Transcoder):
    """A dictionary of features for the values at one site."""

    KIND: ClassVar[str] = "sae"
