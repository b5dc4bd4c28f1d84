"""Neighbours: dictionaries that stand before or behind the analysed heads, and how the two meet in the stream.

    a reader   a feature (or a Lorsa head, through w_v) whose module reads the stream after the heads have written
    a writer   a feature (or a Lorsa head, through w_o) that has written into the stream before the heads read
    a twin     an SAE of the same attn_out.L, whose decoder rows lie where the heads' write vectors lie

Vectors are taken to the stream: a reader's through the norm before its module (gain folded, centred where it centres),
a writer's through the norm behind its module, if there is one. The scale 1/rms of every norm is its mean over a sample
of the text, so a product of a writer and a reader is in units of pre-activation per unit of activation, on the direct
path alone: what layers between make of it is not in it. Dictionaries of another model, site or width are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.load import Dictionary
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import Norm
from clearhead.model.sites import parse
from clearhead.spectral.writes import Parts

STREAM = ("resid_pre", "resid_mid", "resid_post")
SITES = (*STREAM, "attn_in", "attn_out", "mlp_in", "mlp_out")


class LayerSite(NamedTuple):
    """A site of one layer."""

    name: str
    layer: int

    def __str__(self) -> str:
        return f"{self.name}.{self.layer}"


@dataclass(frozen=True, eq=False)
class Neighbour:
    """One dictionary and where it stands."""

    dictionary: Lorsa | Transcoder
    kind: Literal["feature", "lorsa"]
    """The kind of its units."""
    reads: LayerSite
    writes: LayerSite

    @property
    def label(self) -> str:
        """The dictionary in words: units of an SAE and of a transcoder of one layer have the same names."""
        if self.kind == "lorsa":
            return ""
        site = f"SAE of {self.writes}"
        return site if isinstance(self.dictionary, Sae) else f"transcoder of {self.reads}"

    @property
    def encoder(self) -> Float[Tensor, "m d"]:
        """What its units read."""
        return (self.dictionary.W_V if isinstance(self.dictionary, Lorsa) else self.dictionary.W_enc).detach()

    @property
    def decoder(self) -> Float[Tensor, "m d"]:
        """What its units write."""
        return (self.dictionary.W_O if isinstance(self.dictionary, Lorsa) else self.dictionary.W_dec).detach()


class Neighbourhood:
    """The neighbours of the Lorsa heads of one layer, from dictionaries under their names (paths, hub ids).

    strict: refuse a dictionary that neither reads what the heads write nor writes what they read; else leave it out.
    Raises `ClearheadError`, naming it, for that, for a dictionary of another model, width or site, and for two of one
    place.
    """

    def __init__(self, model: Model, layer: int, dictionaries: Mapping[str, Dictionary], *, strict: bool = True):
        self.model, self.layer = model, layer
        self.neighbours: list[Neighbour] = []
        self._parallel = model.family.parallel
        seen: dict[tuple[type, LayerSite, LayerSite], str] = {}
        for name, dictionary in dictionaries.items():
            neighbour = _place(name, model, dictionary)
            key = (type(dictionary), neighbour.reads, neighbour.writes)
            if key in seen:
                raise ClearheadError(f"{seen[key]} and {name} both stand at {neighbour.reads}; give one of them")
            seen[key] = name
            if self.is_reader(neighbour) or self.is_writer(neighbour) or self.is_twin(neighbour):
                self.neighbours.append(neighbour)
            elif strict:
                raise ClearheadError(
                    f"{name} reads {neighbour.reads} and writes {neighbour.writes}, so it meets no head of attention "
                    f"{layer}: give dictionaries that write before resid_pre.{layer} or read behind attn_out.{layer}, "
                    f"or SAEs of attn_out.{layer} or attn_in.{layer}"
                )

    def is_writer(self, neighbour: Neighbour) -> bool:
        """Whether what it writes is in what the heads read."""
        name, layer = neighbour.writes
        if name == "attn_in":
            return layer == self.layer
        depth = {"resid_pre": 0, "attn_out": 2 if self._parallel else 1, "resid_mid": 1, "mlp_out": 2, "resid_post": 2}
        return name in depth and 2 * layer + depth[name] <= 2 * self.layer

    def is_reader(self, neighbour: Neighbour) -> bool:
        """Whether what the heads write is in what it reads."""
        name, layer = neighbour.reads
        depth = {"resid_pre": 0, "attn_in": 0, "resid_mid": 1, "mlp_in": 0 if self._parallel else 1, "resid_post": 2}
        written = 2 * self.layer + (2 if self._parallel else 1)
        return name in depth and 2 * layer + depth[name] >= written

    def is_twin(self, neighbour: Neighbour) -> bool:
        """Whether it is an SAE of the attention output that the heads make up."""
        return neighbour.reads == neighbour.writes == LayerSite("attn_out", self.layer)

    @property
    def writers(self) -> list[Neighbour]:
        """Those that the heads may read."""
        return [neighbour for neighbour in self.neighbours if self.is_writer(neighbour)]

    @property
    def readers(self) -> list[Neighbour]:
        """Those that may read the heads."""
        return [neighbour for neighbour in self.neighbours if self.is_reader(neighbour)]

    @property
    def places(self) -> list[LayerSite]:
        """Where the heads and their neighbours read and write."""
        ends = [end for neighbour in self.neighbours for end in (neighbour.reads, neighbour.writes)]
        return [LayerSite("attn_in", self.layer), LayerSite("attn_out", self.layer), *ends]

    @property
    def twins(self) -> list[Neighbour]:
        """SAEs of the same attention output."""
        return [neighbour for neighbour in self.neighbours if self.is_twin(neighbour)]


class DirectPath:
    """How modules at some places of a model read the stream and write into it, norms at their mean scale over tokens.

    tokens: positions before `first` are left out of the mean. One forward, up to the last norm.
    Raises `ClearheadError` for models whose layers do not all attend by softmax.
    """

    def __init__(self, model: Model, tokens: Int[Tensor, "b t"], first: int, places: Iterable[LayerSite]):
        parts = Parts(model)
        self.multiplier = parts.multiplier
        self._norms = {place: _norm_at(parts, place) for place in places}
        sites = {site for norm, site in self._norms.values() if norm is not None}
        run = model.run(tokens, read=sites) if sites else {}
        self._scales = {
            place: float(norm.frozen_scale(run[site][:, first:].double()).mean())
            for place, (norm, site) in self._norms.items()
            if norm is not None
        }

    @torch.no_grad()
    def reading(self, rows: Float[Tensor, "m d"], place: LayerSite) -> Float[Tensor, "m d"]:
        """Vectors that read a site, as ones that read the stream before it."""
        norm, _ = self._norms[place]
        if norm is None:
            return rows
        rows = rows if norm.gain is None else rows * norm.gain.detach().to(rows)
        return norm.centre(rows) * self._scales[place]

    @torch.no_grad()
    def writing(self, rows: Float[Tensor, "m d"], place: LayerSite) -> Float[Tensor, "m d"]:
        """Vectors written at a site, as what they are in the stream behind it."""
        if place.name in STREAM:
            return rows
        norm, _ = self._norms[place]
        if norm is not None:
            rows = norm.centre(rows) * self._scales[place]
            rows = rows if norm.gain is None else rows * norm.gain.detach().to(rows)
        return rows * self.multiplier


def _norm_at(parts: Parts, place: LayerSite) -> tuple[Norm | None, str]:
    """The norm between a place and the stream, and the site at which it stands."""
    layer, between = place.layer, parts.layers[place.layer]
    before_mlp = "resid_pre" if parts.model.family.parallel else "resid_mid"
    norms = {
        "attn_in": (between.norm, f"resid_pre.{layer}"),
        "mlp_in": (between.mlp_norm, f"{before_mlp}.{layer}"),
        "attn_out": (between.behind_attention, str(place)),
        "mlp_out": (between.behind_mlp, str(place)),
    }
    return norms.get(place.name, (None, str(place)))


def _place(name: str, model: Model, dictionary: Dictionary) -> Neighbour:
    kind, provenance = dictionary.KIND, dictionary.provenance
    trained_on = provenance.get("model")
    if trained_on != model.name:
        raise ClearheadError(
            f"{name} was trained on {trained_on or 'a model that it does not name'}, and the heads are of "
            f"{model.name}; give dictionaries of that model"
        )
    if isinstance(dictionary, Clt):
        raise ClearheadError(f"{name} writes to many layers (a cross-layer transcoder); give transcoders of one layer")
    sites = []
    for end in ("input_site", "output_site"):
        given = provenance.get(end)
        site = parse(given, model.n_layers) if isinstance(given, str) else None
        if site is None or site.name not in SITES or site.layer is None:
            raise ClearheadError(f"{name}, a {kind}, has the {end} {given}; known are {', '.join(SITES)} of a layer")
        sites.append(LayerSite(site.name, site.layer))
    width = dictionary.config.d_model if isinstance(dictionary, Lorsa) else dictionary.config.d_in
    if width != model.d_model:
        raise ClearheadError(f"{name}, a {kind}, reads {width} numbers, and {model.name} has {model.d_model}")
    return Neighbour(dictionary, "lorsa" if isinstance(dictionary, Lorsa) else "feature", *sites)


def names_of(neighbour: Neighbour, side: LayerSite, index: Sequence[int]) -> list[str]:
    """Names of some of its units; features are named by the layer of the site at which they are met."""
    return [f"{neighbour.kind}.{side.layer}.{number}" for number in index]
