"""One text, every head: where it looks, and which few modes make it look there. The spectral lens in three lines:

    model = Model.load("smollm2")
    seen = look(model, "When Mary and John went to the store, John gave a drink to")
    seen.firings(query=-1)

Without controls: those need many firings, and `clearhead spectral run` measures them.
"""

from dataclasses import dataclass

from clearhead.config import Basis
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.spectral.census import Census, take_census
from clearhead.spectral.firings import THRESHOLD, Prompts
from clearhead.spectral.sparsity import cancellation, largest_rank, n_recon, rolls_tovee

MODES_SHOWN = 4


@dataclass(frozen=True)
class SeenFiring:
    """A head that looks at one token, and why."""

    layer: int
    head: int
    query: int
    key: int
    query_token: str
    key_token: str
    attention: float
    relative: float
    """The score of the key less the mean of the other visible keys' scores."""
    sparsity: float
    n_recon: int
    cancellation: float
    largest_rank: float
    sink: bool
    modes: tuple[int, ...]
    """The modes that contribute most to the relative score, by size."""
    contributions: tuple[float, ...]
    rest: float
    """What all other modes contribute together."""

    def __str__(self) -> str:
        modes = ", ".join(f"{mode}: {c:+.2f}" for mode, c in zip(self.modes, self.contributions, strict=True))
        return (
            f"{self.layer}.{self.head} {self.query_token!r}@{self.query} -> {self.key_token!r}@{self.key} "
            f"attention {self.attention:.2f}, relative score {self.relative:.2f} = {modes}, others {self.rest:+.2f}; "
            f"S {self.sparsity:.2f}, N_recon {self.n_recon}"
        )


@dataclass(frozen=True, eq=False)
class Look:
    """All firings of all heads in one text."""

    tokens: list[str]
    census: Census

    def firings(
        self,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        *,
        sinks: bool = False,
        modes: int = MODES_SHOWN,
    ) -> list[SeenFiring]:
        """The firings of a layer, head or query (negative counts from the end), sparsest first; sinks if asked for."""
        length = len(self.tokens)
        if query is not None and not -length <= query < length:
            raise ClearheadError(f"there is no query {query}: the text has {length} tokens, 0 to {length - 1}")
        if layer is not None and layer not in self.census.layers:
            raise ClearheadError(
                f"layer {layer} was not decomposed; there are {', '.join(map(str, self.census.layers))}"
            )
        at = None if query is None else query % length
        found = []
        for number, of_layer in self.census.layers.items():
            if layer is not None and number != layer:
                continue
            firings = of_layer.firings
            c = firings.contributions
            largest = c.abs().topk(min(modes, c.shape[-1]), -1).indices
            numbers = rolls_tovee(c), n_recon(c), cancellation(c), largest_rank(c)
            for place in range(len(firings)):
                which = int(firings.head[place]), int(firings.query[place]), bool(firings.sink[place])
                if (
                    (head is not None and which[0] != head)
                    or (at is not None and which[1] != at)
                    or (which[2] and not sinks)
                ):
                    continue
                shown = largest[place]
                found.append(
                    SeenFiring(
                        layer=number,
                        head=which[0],
                        query=which[1],
                        key=int(firings.key[place]),
                        query_token=self.tokens[which[1]],
                        key_token=self.tokens[int(firings.key[place])],
                        attention=float(firings.attention[place]),
                        relative=float(c[place].sum()),
                        sparsity=float(numbers[0][place]),
                        n_recon=int(numbers[1][place]),
                        cancellation=float(numbers[2][place]),
                        largest_rank=float(numbers[3][place]),
                        sink=which[2],
                        modes=tuple(shown.tolist()),
                        contributions=tuple(c[place, shown].tolist()),
                        rest=float(c[place].sum() - c[place, shown].sum()),
                    )
                )
        return sorted(found, key=lambda one: one.sparsity)


def look(model: Model, text: str, *, threshold: float = THRESHOLD, basis: Basis = "offset") -> Look:
    """Every firing of every head in one text. Raises `ClearheadError` for a text of one token."""
    tokens = model.tokenize(text)[0].cpu()
    every = len(tokens)
    prompts = Prompts([text], [tokens], "prompt")
    census = take_census(model, prompts, threshold=threshold, basis=basis, keep=every, keep_sinks=every)
    return Look(model.token_strings(tokens), census)
