"""One forward of a model: what it read, and the recorder that reads and edits while it runs.

`Run` is what `Model.run` returns: a mapping from sites to tensors. `Recorder` is alive only during the forward: each
place in the model shows it the tensor that passes (`visit`), and continues with what it gets back. A site that is
neither read nor edited costs nothing, because no place is watched for it.

Not here: where the places are (places.py), how attention is opened (attention.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.sites import Site, parse

Path = Literal["sdpa", "eager"]
Edit = Tensor | Callable[[Tensor, "Run"], Tensor]
"""What a site is to hold: a tensor of its shape, or a function of its value and of what the run has read so far."""


class Run(Mapping[str, Tensor]):
    """The tensors that one forward read, by site: `run["attn_in.12"]`.

    While an edit's callable runs, it holds the sites that the same forward has passed and was asked to read; `site` is
    then the site being edited. A site that is both edited and read holds the edited value.
    """

    def __init__(self, tokens: Int[Tensor, "b t"], attention_mask: Tensor | None, path: Path, n_layers: int):
        self.tokens = tokens
        self.attention_mask = attention_mask
        self.path: Path = path
        """The attention function that ran in every layer and row: HF's sdpa, or the family's own eager attention."""
        self.site: Site | None = None
        self._n_layers = n_layers
        self._values: dict[str, Tensor] = {}

    def __getitem__(self, site: str | Site) -> Tensor:
        key = str(site) if str(site) in self._values else str(parse(str(site), self._n_layers))
        if key not in self._values:
            raise UnknownNameError("site of this run", key, self._values, f"Ask for it: run(..., read=[{key!r}]).")
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, site: object) -> bool:
        return str(site) in self._values

    def __repr__(self) -> str:
        shapes = ", ".join(f"{site} {list(value.shape)}" for site, value in self._values.items())
        return f"Run({self.path}; {shapes})"

    @property
    def logits(self) -> Tensor:
        """The logits [b, t, v]; read them with `read=["logits"]`."""
        return self["logits"]


def keep_first(edit: Callable[[Tensor, Run], Tensor]) -> Edit:
    """The edit, but for position 0 of every block, which stays as the model computed it; [b, t, ...]."""

    def edited(value: Tensor, run: Run) -> Tensor:
        return torch.cat([value[:, :1], edit(value, run)[:, 1:].to(value.dtype)], 1)

    return edited


class Finished(BaseException):
    """Ends a forward whose last wanted site has been passed. Not an `Exception`, so that no model swallows it."""


class Recorder:
    """Reads and edits the sites of one forward."""

    def __init__(self, run: Run, read: Iterable[Site], edits: Mapping[Site, Edit], *, grad: bool):
        self.run = run
        self.grad = grad
        self.layer_of: dict[nn.Module, int] = {}
        """The layer that each attention module belongs to."""
        self._read = frozenset(read)
        self._edits = edits
        self._pending = set(self._read) | set(edits)
        self._versions: dict[Site, int] = {}

    @property
    def sites(self) -> frozenset[Site]:
        """Every site that is read or edited."""
        return self._read | frozenset(self._edits)

    @property
    def pending(self) -> set[Site]:
        """The sites that the forward has not passed yet."""
        return self._pending

    def wants(self, *sites: Site) -> bool:
        """Whether one of these sites is read or edited."""
        return any(site in self._read or site in self._edits for site in sites)

    def edits(self, site: Site) -> bool:
        """Whether the site is edited."""
        return site in self._edits

    def rewrites(self, *sites: Site) -> bool:
        """Whether the forward must go on with what `visit` returns, where the site's tensor was derived from another's.

        True for an edit, and for a read with gradients, which must flow through the very tensor that was read.
        """
        return any(site in self._edits or (self.grad and site in self._read) for site in sites)

    def visit(self, site: Site, value: Tensor) -> Tensor:
        """The tensor to continue with at `site`, where `value` passes. Raises `Finished` when nothing is left to do."""
        if site not in self._pending:
            if self.wants(site):
                raise ClearheadError(
                    f"site {site} was passed twice in one forward: layers that share a module are not supported"
                )
            return value
        edit = self._edits.get(site)
        if edit is not None:
            value = self._apply(site, edit, value)
        elif self.grad and not value.requires_grad:
            value.requires_grad_()
        if site in self._read:
            self.run._values[str(site)] = value
            if not value.is_inference():
                self._versions[site] = value._version
        self._pending.discard(site)
        if not self._pending:
            raise Finished
        return value

    def check_unchanged(self) -> None:
        """Raises where the model has since written into a tensor that was read, so that it holds other numbers."""
        for site, version in self._versions.items():
            if self.run._values[str(site)]._version != version:
                raise ClearheadError(
                    f"the model overwrote the tensor of site {site} after it was read: this family computes in place"
                    " there, and the site cannot be read"
                )

    def _apply(self, site: Site, edit: Edit, value: Tensor) -> Tensor:
        """The edited value, of the site's shape and dtype."""
        if isinstance(edit, Tensor):
            new = edit
        else:
            self.run.site = site
            new = edit(value, self.run)
            self.run.site = None
        if not isinstance(new, Tensor):
            raise ClearheadError(f"edit of {site}: expected a tensor, got {type(new).__name__}")
        if new.shape != value.shape:
            raise ClearheadError(f"edit of {site}: expected shape {list(value.shape)}, got {list(new.shape)}")
        if new.device != value.device:
            raise ClearheadError(f"edit of {site}: the tensor is on {new.device}, the model on {value.device}")
        return new.to(value.dtype)


_current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def current_recorder() -> Recorder | None:
    """The recorder of the innermost forward that is running, if any."""
    return _current.get()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Makes `recorder` the current one. Forwards nest: an edit's callable may itself run a model."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)
