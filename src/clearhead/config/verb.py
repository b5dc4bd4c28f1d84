"""What the configurations of all verbs share: validation, a form on disk, and the options of a model and a text."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

import clearhead
from clearhead.errors import ClearheadError

SCHEMA = 1

Dtype = Literal["float32", "bfloat16", "float16"]
Split = Literal["train", "held_out"]
Layers = Annotated[int | str | None, arg(aliases=("--layers",))]
"""One layer, or several: `all`, or numbers with commas between them."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """What all verbs share: a name, validation, and a form on disk that says which version wrote it."""

    verb: ClassVar[str]

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            option = field.name.replace("_", "-")
            self._refuse(isinstance(value, float) and not math.isfinite(value), option, "give a finite number")
            self._refuse(option == "seed" and not 0 <= value < 2**63, option, "give a number from 0 to 2⁶³ − 1")
        self.validate()

    def validate(self) -> None:
        """Refuse what no run could mean; raises `ClearheadError` saying what to type instead."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values, with `schema`, `verb` and the version of clearhead that wrote it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: _plain(value) for name, value in fields.items()}
        return {"schema": SCHEMA, "verb": self.verb, "clearhead": clearhead.__version__} | plain

    def _refuse(self, broken: bool, option: str, expected: str) -> None:
        if broken:
            raise ClearheadError(f"--{option} {getattr(self, option.replace('-', '_'))} is not possible: {expected}")

    def _meaningless(self, options: tuple[str, ...], why: str) -> None:
        """Refuse options that were given another value than their default where they change nothing."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for option in options:
            name = option.replace("-", "_")
            value, default = getattr(self, name), defaults[name]
            if value != default:
                given = f"no-{option}" if default is True else option
                raise ClearheadError(f"--{given} means nothing here: {why}; leave out --{given}")

    def _positive(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option.replace("-", "_"))
            self._refuse(value is not None and value <= 0, option, "give a number above 0")


@dataclass(frozen=True, kw_only=True)
class OfText(Verb):
    """The verbs that start from a model and a text."""

    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    text: str = "default"
    """Text: a Hugging Face dataset id, a folder, a file (txt, jsonl, parquet), or default (needs no network)."""
    context: int = 256
    """Tokens per block; documents are packed into blocks of this length."""
    dtype: Dtype = "float32"
    """Number format of the model's weights."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""

    def validate(self) -> None:
        """Blocks hold at least two tokens: position 0 is reported apart."""
        self._refuse(self.context < 2, "context", "a block needs at least 2 tokens")


@dataclass(frozen=True, kw_only=True)
class OfModel(OfText):
    """The verbs that start from one layer of a model and a text."""

    layer: int | None = None
    """Attention layer; negative counts from the end. Derived: the middle layer."""


@dataclass(frozen=True, kw_only=True)
class OfLayers(OfText):
    """The verbs that start from a model and a text and take one of its layers or several."""

    layer: Layers = None
    """Attention layer, negative from the end; or several, as 5,12,17 or all. Derived: the middle layer."""

    def validate(self) -> None:
        """Besides what all verbs of a text check: several layers are numbers with commas between them, or all."""
        super().validate()
        if isinstance(self.layer, str) and self.layer != "all":
            wrong = not all(re.fullmatch(r"-?[0-9]+", word.strip()) for word in self.layer.split(","))
            self._refuse(wrong, "layer", "give a number, several as 5,12,17, or all")


def _plain(value: Any) -> Any:
    """A field as JSON holds it: paths as text, tuples as lists."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def shortened(text: str, longest: int = 32) -> str:
    """The first words of a text as part of a file's name: [a-z0-9-], whole words where one fits; `prompt` for none."""
    name = ""
    for word in re.findall("[a-z0-9]+", text.lower()):
        if len(name) + 1 + len(word) > longest:
            return name or word[:longest]
        name += f"-{word}" if name else word
    return name or "prompt"


def resolve_layer(layer: int | str | None, n_layers: int) -> int:
    """The layer's index from 0: None is the middle layer, negative numbers count from the end.

    Raises `ClearheadError` for one that does not exist, and for several.
    """
    if layer is None:
        return n_layers // 2
    if isinstance(layer, str):
        raise ClearheadError(f"--layer {layer} names several layers, and here is room for one; give one number")
    if not -n_layers <= layer < n_layers:
        raise ClearheadError(f"there is no layer {layer}: the model has {n_layers}, give 0 to {n_layers - 1}")
    return layer % n_layers


def resolve_layers(layer: int | str | None, n_layers: int) -> list[int]:
    """The layers' indices from 0, each once and in their order; raises `ClearheadError` for one that does not exist."""
    if not isinstance(layer, str):
        return [resolve_layer(layer, n_layers)]
    if layer == "all":
        return list(range(n_layers))
    return sorted({resolve_layer(int(word), n_layers) for word in layer.split(",")})
