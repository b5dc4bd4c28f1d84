"""Run by test_gated_triton.py in a process of its own, where Triton interprets the kernels; answers as JSON."""

import json
import sys

import torch
import triton
import triton.language as tl

from clearhead.bench.gated_device import Sizes, check_on_device
from clearhead.errors import ClearheadError
from clearhead.ops import gated_triton, gated_triton_kernels
from clearhead.ops.gated import Noise, gated_attention_reference, noise_keys, noise_words, uniforms
from clearhead.ops.gated_triton import Tile, Tiles, gated_attention_triton, last_rows

FLOAT16_CASES = ("sampled, widths 96 and 40, documents", "hard, sink, window, length price")
NOISE = Noise(seed=17, layer=4)


@triton.jit
def draw(Keys, Words, Numbers, first_row, first_column, SIZE: tl.constexpr):
    row, column = first_row + tl.arange(0, SIZE), first_column + tl.arange(0, SIZE)
    noise, second = gated_triton_kernels.row_noise(Keys, row, tl.program_id(0))
    words = gated_triton_kernels.noise_words(noise[:, None], second[:, None], column[None, :])
    at = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(Words + at, words.to(tl.int32, bitcast=True))
    tl.store(Numbers + at, gated_triton_kernels.uniforms(words))


def noise():
    """Pairs whose noise differs from the library's in any bit, in the first rows and far out."""
    keys = noise_keys(NOISE, 2, 3, torch.device("cpu"))
    different = 0
    for row, column in ((0, 0), (8000, 7990), (2**31 - 16, 2**31 - 16)):
        words, numbers = torch.empty(2, 3, 16, 16, dtype=torch.int32), torch.empty(2, 3, 16, 16)
        draw[(6,)](keys, words, numbers, row, column, SIZE=16)
        rows, columns = row + torch.arange(16), column + torch.arange(16)
        different += int((words != noise_words(keys, rows, columns)).sum())
        different += int((numbers != uniforms(keys, rows, columns)).sum())
    return {"different": different}


def gates():
    """With unit vectors as values the output is the gated pattern: which edges are open, pair by pair."""
    q, k, _, bias = tensors(t=64)
    eye = torch.eye(64).expand(1, 2, 64, 64)
    out = gated_attention_triton(q, k, eye, bias, mode="sampled", scale=0.25, noise=NOISE).out
    logits = 0.25 * q.double() @ k.double().mT + bias.double()[:, None, None]
    u = uniforms(noise_keys(NOISE, 1, 2, out.device), torch.arange(64), torch.arange(64))
    wanted = (u < logits.sigmoid()) & torch.ones(64, 64).tril().bool()
    return {"different": int((wanted != (out > 0)).sum()), "open": int(wanted.sum())}


def closed():
    """No gate can open: no noise, no values are read; values that are not numbers would show."""
    q, k, v, _ = tensors()
    bias = torch.full((2,), -60.0)
    answer = {}
    for mode in ("sampled", "hard"):
        found = gated_attention_triton(q, k, v * torch.nan, bias, mode=mode, scale=0.25, noise=NOISE)
        answer[f"{mode}: out"] = float(found.out.abs().max())
        answer[f"{mode}: 1 - leak"] = float((1 - found.leak).abs().max())
        sink = torch.zeros(2)
        found = gated_attention_triton(q, k, v * torch.nan, bias, mode=mode, scale=0.25, noise=NOISE, sink=sink)
        answer[f"{mode}, sink: out"] = float(found.out.abs().max())
        answer[f"{mode}, sink: lse"] = float(found.lse.abs().max())
    return answer


def unseen():
    """Rows that see nothing: exactly 0 forward and backward, and no NaN."""
    q, k, v, bias = tensors()
    first = torch.where(torch.arange(40) % 3 == 1, 40, -2)[None]
    q.requires_grad_()
    found = gated_attention_triton(q, k, v, bias, mode="sampled", scale=0.25, noise=NOISE, first=first)
    (dq,) = torch.autograd.grad(found.out.sum() + found.expected.sum(), q)
    blind = first[0] == 40
    rows = [found.out[:, :, blind], dq[:, :, blind], found.expected[:, :, blind], found.leak[:, :, blind]]
    return {
        "largest": max(float(x.abs().max()) for x in rows),
        "opened": int(found.opened[:, :, blind].sum()),
        "lse": bool((found.lse[:, :, blind] == -torch.inf).all()),
        "finite": all(bool(x.isfinite().all()) for x in (found.out, dq, found.expected, found.leak)),
    }


def large_scores():
    """Scores of ±400, where exp of a gate's logit has no value in float32."""
    q, k, v, bias = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    answer = {}
    for sink in (None, torch.zeros(2)):
        found = []
        for run, dtype in ((gated_attention_triton, torch.float32), (gated_attention_reference, torch.float64)):
            own = [x.to(dtype) for x in leaves]
            one = run(*own, mode="sampled", scale=20.0, noise=NOISE, sink=None if sink is None else sink.to(dtype))
            total = (one.out * torch.linspace(-1, 1, 16)).sum() + one.expected.sum()
            found.append([one.out, one.lse, *torch.autograd.grad(total, leaves)])
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), *found, strict=True):
            answer[f"{'all' if sink is None else 'sink'}: {name}"] = float((x - y).norm() / y.norm())
    return answer


def one_row():
    q, k, v, bias = tensors(t=1)
    found = gated_attention_triton(q, k, v, bias, mode="open", scale=0.25)
    return {"error": float((found.out - v).abs().max())}


def other_gates():
    """What the backward pass says when the noise changed since the forward pass."""
    q, k, v, bias = tensors()
    kept = []
    gated_triton.noise_keys = lambda *given: kept.append(noise_keys(*given)) or kept[0]
    found = gated_attention_triton(q, k, v, bias.requires_grad_(), mode="sampled", scale=0.25, noise=NOISE, check=True)
    gated_triton.noise_keys = noise_keys
    kept[0][0, 1] += 1
    return {"said": refusal(lambda: found.out.sum().backward())}


def refusals():
    q, k, v, bias = tensors()
    call = {"mode": "open", "scale": 1.0}
    wide = torch.zeros(1, 2, 4, 300)
    return {
        "bfloat16": refusal(lambda: gated_attention_triton(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias, **call)),
        "float64": refusal(lambda: gated_attention_triton(q.double(), k.double(), v.double(), bias, **call)),
        "mixed": refusal(lambda: gated_attention_triton(q.half(), k, v, bias, **call)),
        "wide": refusal(lambda: gated_attention_triton(wide.half(), wide.half(), wide.half(), bias, **call)),
    }


def reach():
    """How far the rows reach that see a tile of keys, against the definition."""
    draw = torch.Generator().manual_seed(1)
    tile, wrong = Tile(4, 8, 1, 1), 0
    for t in (1, 8, 21):
        first = torch.randint(0, t + 2, (3, t), generator=draw)
        for b in range(3):
            for n, end in enumerate(last_rows(first, tile)[b].tolist()):
                seeing = [i for i in range(t) if first[b, i] <= min(i, 8 * n + 7) and i >= 8 * n]
                wrong += bool(seeing) and (seeing[-1] >= end or end > seeing[-1] // 4 * 4 + 4)
    return {"wrong": wrong}


def tensors(t=40):
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, t, 16, generator=draw) for _ in range(3))
    return q, k, v, torch.tensor([-0.5, 0.5])


def refusal(run):
    try:
        run()
    except ClearheadError as error:
        return str(error)
    return "not refused"


def main():
    torch.set_num_threads(1)
    float32 = check_on_device("cpu", dtype=torch.float32, sizes=Sizes(1, 2, 1, 40))
    small = Tiles(Tile(16, 32, 1, 1), Tile(32, 16, 1, 1), Tile(32, 32, 1, 1))
    gated_triton.TILES.update(dict.fromkeys(gated_triton.TILES, small))
    float16 = check_on_device("cpu", dtype=torch.float16, sizes=Sizes(2, 4, 2, 40), cases=FLOAT16_CASES)
    answer = {"float32": float32, "float16": float16}
    for run in (noise, gates, closed, unseen, large_scores, one_row, other_gates, refusals, reach):
        answer[run.__name__] = run()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
