"""What gated attention costs beside dense attention: time of both passes, hard gates, peak memory, error of gradients.

All forms see the same queries, keys and values and take turns; medians are reported, of CPU time on the CPU and of
elapsed time on a device, and only ratios within one run mean much on a machine that is shared. Peak memory is that of a
process of its own per form, above what its imports hold. Gradients are compared with the float64 reference on one batch
row and three heads. Not here: what the kernels of a GPU must pass first (gated_device.py).
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops.gated import Noise, gated_attention, gated_attention_reference

SPARSE_BIAS = -2.75
"""Of scores that are nearly normal, 0.3 % lie above its negative."""
FORMS = ("dense", "gated", "laid out")
LAID_OUT_BYTES = 64
"""What the form with every pair laid out takes per pair, about; where that is more than there is, it is left out."""
CPU_BYTES = 2**33
GRADIENT_TOKENS = 1024
"""Tokens, at most, whose gradients are compared: the reference lays out every pair in float64."""
MEMORY = """
import json, sys, torch
from pathlib import Path
from clearhead.bench.gated import prepare_forms
form, b, h, t, d, threads = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

prepare_forms(1, 2, 64, d, "cpu", torch.float32)[form]()  # kernels are loaded
work = prepare_forms(b, h, t, d, "cpu", torch.float32)[form]
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
work()
sys.stdout.write(json.dumps(resident("VmHWM") - before))
"""


def time_gated(
    batch: int, heads: int, t: int, width: int, *, device: str, repeats: int, threads: int
) -> dict[str, float]:
    """The numbers of one shape. Raises `ClearheadError` for a CUDA device that is not there."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ClearheadError(f"--device {device}: torch {torch.__version__} finds no CUDA device; use --device cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(batch, heads, t, width, device, repeats, threads)
    finally:
        torch.set_num_threads(before)


def prepare_forms(
    batch: int, heads: int, t: int, width: int, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """One training step (forward and backward) of each of FORMS, with the same inputs and output gradients."""
    q, k, v, upstream, bias = _inputs(batch, heads, t, width, device, dtype)
    for leaf in (q, k, v, bias):
        leaf.requires_grad_()

    def dense() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), upstream)

    def gated(attend: Callable = gated_attention) -> None:
        found = attend(q, k, v, bias, mode="sampled", scale=width**-0.5, noise=Noise(1))
        price = torch.full_like(found.expected, 1e-3)
        torch.autograd.grad((found.out, found.expected), (q, k, v, bias), (upstream, price))

    return {"dense": dense, "gated": gated, "laid out": lambda: gated(gated_attention_reference)}


def _measure(batch: int, heads: int, t: int, width: int, device: str, repeats: int, threads: int) -> dict[str, float]:
    on_cpu = torch.device(device).type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    forms = prepare_forms(batch, heads, t, width, device, dtype)
    free = CPU_BYTES if on_cpu else torch.cuda.mem_get_info(device)[0]
    if batch * heads * t * t * LAID_OUT_BYTES > free:
        del forms["laid out"]
    q, k, v, _, bias = _inputs(batch, heads, t, width, device, dtype)
    scale = width**-0.5

    def hard(at: Tensor) -> Callable[[], object]:
        return lambda: gated_attention(q, k, v, at, mode="hard", scale=scale)

    with torch.no_grad():
        few = gated_attention(q, k, v, bias + SPARSE_BIAS, mode="hard", scale=scale).opened
    work = forms | {
        "dense forward": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "hard forward, few open": hard(bias + SPARSE_BIAS),
        "hard forward, all open": hard(bias + 100.0),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(repeats + 1):  # the first one builds and warms up
        for name, task in work.items():
            if name in forms:
                spent = _timed(task, device)
            else:
                with torch.no_grad():
                    spent = _timed(task, device)
            if round_:
                times[name].append(spent)
    unit = "CPU ms" if on_cpu else "ms"
    numbers = {f"{name} ({unit})": 1e3 * statistics.median(values) for name, values in times.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    numbers |= {
        "gated / dense": ratio("gated", "dense"),
        **({"laid out / gated": ratio("laid out", "gated")} if "laid out" in forms else {}),
        "hard, few open / dense forward": ratio("hard forward, few open", "dense forward"),
        "hard, all open / dense forward": ratio("hard forward, all open", "dense forward"),
        "open edges in 'few open' (%)": 100 * float(few.double().sum()) / (batch * heads * t * (t + 1) / 2),
        "error of gradients": gradient_error(min(t, GRADIENT_TOKENS), width, device),
    }
    if on_cpu and sys.platform == "linux":  # elsewhere the peak of a process cannot be reset
        sizes = [str(n) for n in (batch, heads, t, width, threads)]
        peaks = {form: _peak(form, sizes) for form in forms}
        numbers |= {f"peak memory, {form} (MB)": peak / 1e6 for form, peak in peaks.items()}
        numbers["peak memory, gated / dense"] = peaks["gated"] / max(peaks["dense"], 1)
    return numbers


def gradient_error(t: int, width: int, device: str = "cpu") -> float:
    """Largest error of the gradients in float32, relative to the largest of the float64 reference's own."""
    inputs = _inputs(1, 3, t, width, "cpu", torch.float64)
    leaves = [x.requires_grad_() for x in (*inputs[:3], inputs[4])]
    sent = [x.detach().float().to(device).requires_grad_() for x in leaves]
    found = []
    for attend, given, upstream in (
        (gated_attention_reference, leaves, inputs[3]),
        (gated_attention, sent, inputs[3].float().to(device)),
    ):
        result = attend(*given, mode="sampled", scale=width**-0.5, noise=Noise(1))
        price = torch.full_like(result.expected, 1e-3)
        found.append(torch.autograd.grad((result.out, result.expected), given, (upstream, price)))
    pairs = zip(*found, strict=True)
    return max(float((wide - narrow.double().cpu()).abs().max() / wide.abs().max()) for wide, narrow in pairs)


def _inputs(
    batch: int, heads: int, t: int, width: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(batch, heads, t, width, generator=draw, dtype=torch.float64).to(device, dtype) for _ in range(4)
    )
    wide = dtype if dtype == torch.float64 else torch.float32
    return q, k, v, upstream, torch.zeros(heads, dtype=wide, device=device)


def _timed(task: Callable[[], object], device: str) -> float:
    if torch.device(device).type == "cpu":
        begun = time.process_time()
        task()
        return time.process_time() - begun
    torch.cuda.synchronize()
    begun = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _peak(form: str, sizes: list[str]) -> int:
    """Bytes that one step of a form needs above what was resident before it, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEMORY, form, *sizes], capture_output=True, text=True, check=True)
    return json.loads(done.stdout) * 1024
