"""The benchmarks, ours and the peers', side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clearhead.config.verb import Verb


@dataclass(frozen=True, kw_only=True)
class BenchLorsa(Verb):
    """Time one training step against a dense implementation and the reference package."""

    verb: ClassVar[str] = "bench lorsa"

    d_model: int = 512
    """Width of the layer."""
    context: int = 256
    """Tokens per block."""
    batch: int = 8
    """Blocks per step."""
    heads: int = 4096
    """Number of Lorsa heads."""
    groups: int = 64
    """Number of QK groups."""
    d_qk: int = 64
    """Width of queries and keys."""
    k: int = 64
    """Heads active per token."""
    repeats: int = 10
    """Timed steps per implementation; the implementations take turns, and the median is reported."""
    threads: int = 2
    """Threads of each implementation."""
    reference_python: Path | None = None
    """Python of an environment with the reference package (docs/howto/bench.md). Derived: none, it is left out."""
    out: Path = Path("benchmarks")
    """Directory of the report, named by date and machine."""

    def validate(self) -> None:
        """Counts are positive and fit each other."""
        self._positive("d-model", "context", "batch", "heads", "groups", "d-qk", "k", "repeats", "threads")
        self._refuse(self.k > self.heads, "k", f"at most all {self.heads} heads can be active")
        self._refuse(self.heads % self.groups != 0, "groups", f"it must divide the {self.heads} heads")


@dataclass(frozen=True, kw_only=True)
class BenchZPattern(Verb):
    """Time the exact split of every activation over its source tokens."""

    verb: ClassVar[str] = "bench zpattern"

    d_model: int = 128
    """Width of the layer."""
    context: int = 64
    """Tokens per block."""
    blocks: int = 48
    """Blocks analysed."""
    heads: int = 1024
    """Number of Lorsa heads."""
    groups: int = 16
    """Number of QK groups."""
    k: int = 32
    """Heads active per token."""
    repeats: int = 3
    """Timed passes; the median is reported."""
    threads: int = 1
    """Threads."""
    out: Path = Path("benchmarks")
    """Directory of the report, named by date and machine."""

    def validate(self) -> None:
        """Counts are positive and fit each other."""
        self._positive("d-model", "context", "blocks", "heads", "groups", "k", "repeats", "threads")
        self._refuse(self.k > self.heads, "k", f"at most all {self.heads} heads can be active")
        self._refuse(self.heads % self.groups != 0, "groups", f"it must divide the {self.heads} heads")


@dataclass(frozen=True, kw_only=True)
class BenchSpectral(Verb):
    """Time the decomposition of every head, and a census against its forward passes."""

    verb: ClassVar[str] = "bench spectral"

    model: str = "smollm2"
    """Model under study, as for `clearhead spectral run`."""
    context: int = 64
    """Tokens per block."""
    blocks: int = 128
    """Blocks of the default text, from its held-out part."""
    repeats: int = 2
    """Timed passes, in turns; medians are reported."""
    threads: int = 1
    """Threads."""
    out: Path = Path("benchmarks")
    """Directory of the report, named by date and machine."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("context", "blocks", "repeats", "threads")
        self._refuse(self.context < 2, "context", "a query needs at least 2 keys to choose from")


@dataclass(frozen=True, kw_only=True)
class BenchGated(Verb):
    """Time gated attention beside dense attention, with its memory and the error of its gradients."""

    verb: ClassVar[str] = "bench gated"

    batch: int = 2
    """Sequences."""
    heads: int = 12
    """Heads."""
    context: int = 1024
    """Tokens per sequence."""
    width: int = 64
    """Width of a head."""
    device: str = "cpu"
    """cpu (float32, CPU time), or a CUDA device (bfloat16, elapsed time), whose kernels are checked first."""
    repeats: int = 5
    """Timed steps of each form, in turns; medians are reported."""
    threads: int = 1
    """Threads on the CPU."""
    out: Path = Path("benchmarks")
    """Directory of the report, named by date and machine."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("batch", "heads", "context", "width", "repeats", "threads")


@dataclass(frozen=True, kw_only=True)
class BenchCircuits(Verb):
    """Time patches of every head of one prompt against the same rows as plain forwards."""

    verb: ClassVar[str] = "bench circuits"

    model: str = "smollm2"
    """Model under study, as for `clearhead circuit curve`."""
    tokens: int = 18
    """Tokens of the prompt."""
    repeats: int = 3
    """Timed passes, in turns; medians are reported."""
    threads: int = 1
    """Threads."""
    out: Path = Path("benchmarks")
    """Directory of the report, named by date and machine."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("tokens", "repeats", "threads")
        self._refuse(self.tokens < 2, "tokens", "a query needs at least 2 keys to choose from")
