"""Whether the GPU kernels of gated attention are right on this device, where no test without a GPU can tell.

    python -m clearhead.bench.gated_device      prints what is wrong in each precision; status 1 if anything is
    check_on_device("cuda")                     the numbers

runs every kind of call once and answers, by name:

    error of ...     ‖found − reference‖ / ‖reference‖ of out, lse, expected, dq, dk, dv, dbias, dsink, against the
                     explicit reference in float64 on the same inputs; of leak, the largest difference
    flips            rows with another number of open edges than the reference, which rounds scores otherwise: a few
    kernels differ   1 where forward, query_gradient and key_gradient did not open the same edges: must be 0
    tiles differ     rows with another number of open edges in tiles of another size: must be 0

The kernels' gates are compared by the sum of the random words of a head's open edges. Measures no time.
"""

import sys
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops import gated_triton
from clearhead.ops.gated import Estimator, Gated, Mode, Noise, gated_attention_reference
from clearhead.ops.gated_triton import Tile, Tiles, gated_attention_triton

NOISE = Noise(seed=3, layer=2, batch=5, head=1)


class Case(NamedTuple):
    """One kind of call."""

    mode: Mode = "sampled"
    width: int = 64
    out_width: int = 64
    sink: bool = False
    seen: Literal["all", "window", "documents"] = "all"
    slope: float = 0.0
    estimator: Estimator = "straight_through"


CASES = {
    "sampled": Case(),
    "sampled, width 128": Case(width=128, out_width=128),
    "sampled, widths 96 and 40, documents": Case(width=96, out_width=40, seen="documents"),
    "sampled, exact, length price": Case(estimator="exact", slope=0.01),
    "sampled, sink": Case(sink=True),
    "sampled, sink, documents, length price, width 128": Case("sampled", 128, 128, True, "documents", 0.01),
    "hard, window": Case("hard", seen="window"),
    "hard, sink, window, length price": Case("hard", sink=True, seen="window", slope=0.01),
    "open": Case("open"),
    "open, sink, length price": Case("open", sink=True, slope=0.01),
}
FEW_CASES = ("sampled, exact, length price", "hard, sink, window, length price")


class Sizes(NamedTuple):
    """How large the calls are. The default leaves the last tiles ragged, and like most lengths divides by 16, for which
    Triton makes code of its own.
    """

    batch: int = 2
    heads: int = 8
    groups: int = 2
    t: int = 1008


SIZES = Sizes()

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
"""What an error may be, for rounding: bfloat16 has 8 bits, and gradients pass through three roundings."""

OTHER_TILES = {64: Tiles(*[Tile(64, 32, 4, 1)] * 3), 32: Tiles(*[Tile(16, 32, 4, 1)] * 3)}
"""Tiles that form q·k by the same instruction as those in use: from 64 rows on, or below."""


def check_on_device(
    device: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes = SIZES,
    cases: Iterable[str] = tuple(CASES),
) -> dict[str, float]:
    """The numbers above for these cases (names in CASES), under "case: question".

    Raises `ClearheadError` for a device on which the kernels do not run, `UnknownNameError` for a case.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ClearheadError(f"device {device!r}: torch {torch.__version__} finds no CUDA device on this machine")
    numbers: dict[str, float] = {}
    for name in cases:
        if name not in CASES:
            raise UnknownNameError("case of gated attention", name, CASES)
        inputs = _draw(CASES[name], device, dtype, sizes)
        numbers |= {f"{name}: {question}": value for question, value in _compare(CASES[name], inputs).items()}
    numbers["tiles differ"] = _count_changes(_draw(Case(), device, dtype, sizes))
    return numbers


def find_problems(numbers: dict[str, float], dtype: torch.dtype, sizes: Sizes = SIZES) -> list[str]:
    """What of `check_on_device` is beyond rounding, one line each; 1 row in 50 may flip, as scores round otherwise."""
    rows = sizes.batch * sizes.heads * sizes.t
    limits = {"kernels differ": 0.0, "tiles differ": 0.0, "flips": rows / 50}
    problems = []
    for name, value in numbers.items():
        limit = limits.get(name.split(": ")[-1], TOLERANCE[dtype])
        if not value <= limit:
            problems.append(f"{name}: {value:.3g}, at most {limit:.3g}")
    return problems


class _Inputs(NamedTuple):
    """Tensors of one call, and the weights of the sum whose gradients are compared."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    sink: Tensor | None
    first: Tensor | None
    of_out: Tensor
    of_expected: Tensor


def _draw(case: Case, device: str, dtype: torch.dtype, sizes: Sizes) -> _Inputs:
    batch, heads, groups, t = sizes
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    first = None
    if case.seen == "window":
        first = (torch.arange(t) - t // 3).clamp(min=0).expand(batch, t)
    elif case.seen == "documents":
        length = torch.arange(batch)[:, None] * 7 + t // 3
        first = torch.arange(t) // length * length
        first[:, t // 2] = t  # a row that sees nothing
    inputs = _Inputs(
        q=(2 * normal(batch, heads, t, case.width)).to(dtype),
        k=normal(batch, groups, t, case.width).to(dtype),
        v=normal(batch, groups, t, case.out_width).to(dtype),
        bias=normal(heads) - 1.0,
        sink=normal(heads) if case.sink else None,
        first=first,
        of_out=normal(batch, heads, t, case.out_width).to(dtype),
        of_expected=0.1 * normal(batch, heads, t),
    )
    return _Inputs(*(None if x is None else x.to(device) for x in inputs))  # pyright: ignore[reportArgumentType]


def _compare(case: Case, inputs: _Inputs) -> dict[str, float]:
    expected, wanted = _run(case, inputs, reference=True)
    numbers = {"kernels differ": 0.0}
    try:
        found, gradients = _run(case, inputs, check=True)
    except ClearheadError:
        numbers["kernels differ"] = 1.0
        found, gradients = _run(case, inputs)
    numbers["flips"] = float((found.opened != expected.opened).sum())
    numbers |= {
        f"error of {name}": _error(getattr(found, name), getattr(expected, name)) for name in ("out", "expected")
    }
    finite = expected.lse.isfinite()
    numbers["error of lse"] = _error(found.lse[finite], expected.lse[finite])
    numbers["error of leak"] = float((found.leak - expected.leak).abs().max())
    numbers |= {f"error of d{name}": _error(gradients[name], wanted[name]) for name in wanted}
    return numbers


def _run(case: Case, inputs: _Inputs, reference: bool = False, check: bool = False) -> tuple[Gated, dict[str, Tensor]]:
    """The result and the gradients of  Σ out · of_out + Σ expected · of_expected."""
    leaves = {name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "sink")}
    leaves = {name: x.double() if reference else x for name, x in leaves.items() if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    found = _call(case, inputs._replace(**leaves), reference, check)
    total = (found.out * inputs.of_out).sum() + (found.expected * inputs.of_expected).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return Gated(*(x.detach() for x in found)), dict(zip(leaves, gradients, strict=True))


def _call(case: Case, inputs: _Inputs, reference: bool = False, check: bool = False) -> Gated:
    settings: dict[str, Any] = {"mode": case.mode, "scale": case.width**-0.5, "noise": NOISE, "first": inputs.first}
    settings |= {"slope": case.slope, "estimator": case.estimator, "sink": inputs.sink}
    four = (inputs.q, inputs.k, inputs.v, inputs.bias)
    if reference:
        return gated_attention_reference(*four, **settings)
    return gated_attention_triton(*four, **settings, check=check)


def _count_changes(inputs: _Inputs) -> float:
    table = gated_triton.FLOAT32_TILES if inputs.q.dtype == torch.float32 else gated_triton.TILES
    before = table[64]
    found = _call(Case(), inputs)
    table[64] = OTHER_TILES[64 if before.forward.rows >= 64 else 32]
    try:
        again = _call(Case(), inputs)
    finally:
        table[64] = before
    return float((found.opened != again.opened).sum())


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def main() -> int:
    """Checks this machine's CUDA device."""
    sound = True
    for dtype in TOLERANCE:
        # to compile a kernel takes seconds, and the precisions differ in their products alone
        numbers = check_on_device("cuda", dtype=dtype, cases=CASES if dtype == torch.bfloat16 else FEW_CASES)
        problems = find_problems(numbers, dtype)
        sound &= not problems
        worst = max((name for name in numbers if "error of" in name), key=numbers.__getitem__)
        flips = sum(value for name, value in numbers.items() if name.endswith("flips"))
        sys.stdout.write(
            f"{dtype}: {len(problems)} problems, {flips:.0f} flips, largest {worst} {numbers[worst]:.2e}\n"
        )
        sys.stdout.writelines(f"  {problem}\n" for problem in problems)
        sys.stdout.flush()
    return 0 if sound else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClearheadError as error:
        sys.exit(f"clearhead: {error}")
