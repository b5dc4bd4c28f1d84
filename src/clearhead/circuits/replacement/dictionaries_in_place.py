"""Dictionaries put in the place of the components that they imitate, one per layer and site.

    mlp[l]        what MLP l computes from `mlp_in.l`: a transcoder
    clt           what every MLP computes, from the inputs of all MLPs up to it: a cross-layer transcoder
    attention[l]  what attention l computes from `attn_in.l`: a Lorsa

A dictionary says in its provenance which model it was trained on, at which layer and sites. One of another model, one
for sites that it cannot stand at, and two for one place are refused. Weights are copied to the model's device, in
float32 at least, so that sums over thousands of units do not round.

Not here: what the dictionaries say about a prompt (tracing/sources.py, tracing/readers.py).
"""

import copy
from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.dictionaries.activation import Codes
from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.load import Dictionary
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.model.access import Model


class Dictionaries:
    """Which dictionary stands where in one model.

    Raises `ClearheadError` for a dictionary of another model, layer, width or site, and for two in one place.
    """

    def __init__(self, model: Model, dictionaries: Iterable[Dictionary] = ()):
        self.model = model
        self.mlp: dict[int, Transcoder] = {}
        self.attention: dict[int, Lorsa] = {}
        self.clt: Clt | None = None
        for dictionary in dictionaries:
            self._place(dictionary)

    @property
    def mlp_layers(self) -> list[int]:
        """The layers whose MLP is imitated."""
        return sorted(self.mlp) if self.clt is None else list(range(self.model.n_layers))

    def __len__(self) -> int:
        return len(self.mlp) + len(self.attention) + (self.clt is not None)

    def describe(self) -> list[str]:
        """Each dictionary in words: what it is, where it stands, how wide it is."""
        named = [f"transcoder at layer {layer}, {d.W_enc.shape[0]:,} features" for layer, d in self.mlp.items()]
        named += [f"Lorsa at layer {layer}, {d.n_heads:,} heads" for layer, d in self.attention.items()]
        if self.clt is not None:
            named.append(f"cross-layer transcoder, {self.clt.config.n_features:,} features per layer")
        return named

    def encode_mlp(self, layer: int, x: Float[Tensor, "t d"]) -> Codes:
        """The features of layer `layer` that are active for what its MLP reads."""
        return self.mlp[layer].encode(x) if self.clt is None else self.clt.encode(layer, x)

    def encoder(self, layer: int) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
        """W_enc and b_enc of the features of layer `layer`."""
        if self.clt is None:
            return self.mlp[layer].W_enc, self.mlp[layer].b_enc
        return self.clt.W_enc[layer], self.clt.b_enc[layer]

    def decoders(self, layer: int) -> Iterator[tuple[int, Float[Tensor, "n d"]]]:
        """Layers that the features of layer `layer` write to, with what they write there."""
        if self.clt is None:
            yield layer, self.mlp[layer].W_dec
        else:
            for above in range(layer, self.clt.n_layers):
                yield above, self.clt.W_dec[layer][:, above - layer]

    def mlp_bias(self, layer: int) -> Float[Tensor, " d"]:
        """What the dictionary of layer `layer`'s MLP writes whatever it reads."""
        return self.mlp[layer].b_dec if self.clt is None else self.clt.b_dec[layer]

    def skip(self, layer: int, x: Float[Tensor, "t d"]) -> Float[Tensor, "t d"] | None:
        """What a skip connection writes; None where there is none."""
        if self.clt is not None or self.mlp[layer].W_skip is None:
            return None
        return self.mlp[layer].linear(x)

    def _place(self, dictionary: Dictionary) -> None:
        name = type(dictionary).__name__
        trained_on = dictionary.provenance.get("model")
        if trained_on != self.model.name:
            raise ClearheadError(
                f"this {name} was trained on {trained_on or 'a model that it does not name'}, and is to stand in "
                f"{self.model.name}: its features read and write another stream; give one of {self.model.name}"
            )
        placed = self._moved(dictionary)
        if isinstance(placed, Clt):
            if self.mlp or self.clt is not None:
                raise ClearheadError("a cross-layer transcoder imitates every MLP: give no other dictionary of MLPs")
            if placed.config.n_layers != self.model.n_layers:
                raise ClearheadError(
                    f"this {name} has {placed.config.n_layers} layers and {self.model.name} has {self.model.n_layers}"
                )
            self._check_sites(dictionary, "mlp_in.*", "mlp_out.*")
            self.clt = placed
        elif isinstance(placed, Lorsa):
            layer = self._layer(dictionary, "attn_in", "attn_out")
            self._refuse_second(self.attention, layer, "attention")
            self.attention[layer] = placed
        else:
            layer = self._layer(dictionary, "mlp_in", "mlp_out")
            if self.clt is not None:
                raise ClearheadError("a cross-layer transcoder imitates every MLP: give no other dictionary of MLPs")
            self._refuse_second(self.mlp, layer, "the MLP")
            self.mlp[layer] = placed

    def _layer(self, dictionary: Dictionary, read: str, write: str) -> int:
        """The layer it belongs to, its sites being those of that layer."""
        name, provenance = type(dictionary).__name__, dictionary.provenance
        layer = provenance.get("layer")
        if not isinstance(layer, int) or not 0 <= layer < self.model.n_layers:
            raise ClearheadError(
                f"this {name} belongs to layer {layer}, and {self.model.name} has layers 0 to {self.model.n_layers - 1}"
            )
        self._check_sites(dictionary, f"{read}.{layer}", f"{write}.{layer}")
        return layer

    def _check_sites(self, dictionary: Dictionary, read: str, write: str) -> None:
        """What it reads and writes, and how wide that is."""
        name, provenance = type(dictionary).__name__, dictionary.provenance
        sites = (provenance.get("input_site"), provenance.get("output_site"))
        if sites != (read, write):
            raise ClearheadError(
                f"this {name} reads {sites[0]} and writes {sites[1]}; to stand in a graph it has to read {read} and "
                f"write {write} (a transcoder, or a Lorsa for attention)"
            )
        width = dictionary.b_D.shape[0] if isinstance(dictionary, Lorsa) else dictionary.b_dec.shape[-1]
        if width != self.model.d_model:
            raise ClearheadError(f"this {name} writes {width} numbers and {self.model.name} has {self.model.d_model}")

    def _refuse_second(self, placed: dict[int, Transcoder] | dict[int, Lorsa], layer: int, what: str) -> None:
        if layer in placed:
            raise ClearheadError(f"two dictionaries stand for {what} of layer {layer}; give one of them")

    def _moved(self, dictionary: Dictionary) -> Dictionary:
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        return copy.deepcopy(dictionary).to(device=self.model.device, dtype=dtype).eval().requires_grad_(False)
