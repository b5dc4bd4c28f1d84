"""One implementation of the Lorsa training step in a process of its own, driven by lines on standard input.

    python worker.py {ours | dense | reference} PROBLEM.safetensors

All three start from the same weights, input and target, and compute the same step:

    loss = mean over tokens of sum over d of (y - y_hat)^2,  its gradients,  one Adam update

`ours` is clearhead's dictionary with the fused optimiser and unit decoder rows; `dense` is the layer written down
plainly in torch (explicit patterns, masked codes, dense decoding); `reference` is llamascopium's class and loss. Each
line read is one command, `gradients FILE`, `step` or `end`, answered by one line of JSON. This file imports nothing
of clearhead before `ours` needs it: the reference runs it in another environment.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROTARY_DIM = 16
ROTARY_BASE = 10000
LR = 1e-4


def build_ours(problem: dict[str, Any], sizes: dict[str, int]) -> tuple[Callable[[], Any], Any, Callable[[], None]]:
    """Clearhead's Lorsa."""
    import torch

    from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
    from clearhead.model.rope import RopeSpec
    from clearhead.training.optim import adam

    half = ROTARY_DIM // 2
    rope = RopeSpec(ROTARY_BASE ** (-torch.arange(half) / half), 1.0, False, ROTARY_DIM)
    config = LorsaConfig(
        d_model=sizes["d"],
        n_heads=sizes["n"],
        n_groups=sizes["g"],
        d_qk=sizes["dh"],
        k=sizes["k"],
        scale=sizes["dh"] ** -0.5,
        rope=rope.to_dict(),
    )
    lorsa = Lorsa(config)
    with torch.no_grad():
        for name, parameter in lorsa.named_parameters():
            parameter.copy_(problem[name].view_as(parameter))
    optimizer = adam([(list(lorsa.parameters()), 1.0)], LR, (0.9, 0.999))
    x, target = problem["x"], problem["target"]

    def loss() -> torch.Tensor:
        return (lorsa(x).y - target).square().sum(-1).mean()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        lorsa.normalise_decoder()

    return loss, dict(lorsa.named_parameters()), update


def build_dense(problem: dict[str, Any], sizes: dict[str, int]) -> tuple[Callable[[], Any], Any, Callable[[], None]]:
    """The layer as its formulas read, with nothing sparse and nothing fused."""
    import torch

    weights = {name: torch.nn.Parameter(problem[name].clone()) for name in NAMES}
    optimizer = torch.optim.Adam(weights.values(), lr=LR)
    x, target = problem["x"], problem["target"]
    b, t, _ = x.shape
    g, dh, n, k = sizes["g"], sizes["dh"], sizes["n"], sizes["k"]
    half = ROTARY_DIM // 2
    angle = torch.arange(t)[:, None] * ROTARY_BASE ** (-torch.arange(half) / half)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    future = torch.ones(t, t, dtype=torch.bool).triu(1)

    def project(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        flat = (x @ weight.view(g * dh, -1).T + bias.view(-1)).view(b, t, g, dh).transpose(1, 2)
        turned = flat[..., :ROTARY_DIM]
        swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
        return torch.cat([turned * cos + swapped * sin, flat[..., ROTARY_DIM:]], -1)

    def loss() -> torch.Tensor:
        q, key = project(weights["W_Q"], weights["b_Q"]), project(weights["W_K"], weights["b_K"])
        v = (x @ weights["W_V"].T + weights["b_V"]).view(b, t, g, n // g).transpose(1, 2)
        scores = (q @ key.transpose(-1, -2) * dh**-0.5).masked_fill(future, -torch.inf)
        z = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, n)
        active = z.relu()
        kept = torch.zeros_like(active).scatter(-1, active.topk(k, dim=-1).indices, 1.0)
        y = (active * kept) @ weights["W_O"] + weights["b_D"]
        return (y - target).square().sum(-1).mean()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return loss, weights, update


def build_reference(
    problem: dict[str, Any], sizes: dict[str, int]
) -> tuple[Callable[[], Any], Any, Callable[[], None]]:
    """The LowRankSparseAttention of llamascopium with its own loss and optimiser, metrics off."""
    import torch
    from llamascopium.models.lorsa import (  # pyright: ignore[reportMissingImports]
        LorsaConfig,
        LowRankSparseAttention,
    )

    b, t, d = problem["x"].shape
    config = LorsaConfig(
        d_model=d,
        expansion_factor=sizes["n"] / d,
        n_qk_heads=sizes["g"],
        d_qk_head=sizes["dh"],
        rotary_dim=ROTARY_DIM,
        rotary_base=ROTARY_BASE,
        rotary_adjacent_pairs=False,
        n_ctx=t,
        hook_point_in="in",
        hook_point_out="out",
        act_fn="topk",
        top_k=sizes["k"],
        device="cpu",
        dtype=torch.float32,
    )
    lorsa = LowRankSparseAttention(config)
    with torch.no_grad():
        for name in NAMES:
            weight = problem[name].transpose(1, 2) if name in ("W_Q", "W_K") else problem[name]
            getattr(lorsa, name).copy_(weight.reshape(getattr(lorsa, name).shape))
    optimizer = torch.optim.Adam(lorsa.parameters(), lr=LR)
    batch = {"in": problem["x"], "out": problem["target"], "tokens": torch.zeros(b, t, dtype=torch.long)}

    def loss() -> torch.Tensor:
        return lorsa.compute_loss(batch)["loss"]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return loss, {name: getattr(lorsa, name) for name in NAMES}, update


NAMES = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_D")
BUILDERS = {"ours": build_ours, "dense": build_dense, "reference": build_reference}


def main() -> None:
    """Serve commands until `end`."""
    name, path = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not mix with the answers
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        sizes = {key: int(value) for key, value in file.metadata().items()}
    torch.set_num_threads(sizes["threads"])
    build = BUILDERS[name]
    # the implementation's own imports belong to the base line, so build a tiny one first
    small = sizes | {"d": 32, "n": 32, "g": 2, "dh": 16, "k": 2}
    run_step(*build(tiny_problem(small), small))
    before = resident_bytes()
    loss, weights, update = build(load_file(path), sizes)
    reset_peak()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(ready=True, torch=torch.__version__)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "gradients":
            value = loss()
            value.backward()
            save_file({key: plain_gradient(key, weights[key].grad, sizes) for key in NAMES}, argument)
            for weight in weights.values():
                weight.grad = None
            answer(loss=value.item())
            del value
        elif command == "step":
            answer(**run_step(loss, weights, update))
        else:
            answer(peak=peak_bytes() - before)
            return


def run_step(loss: Callable[[], Any], weights: Any, update: Callable[[], None]) -> dict[str, float]:
    """Wall and CPU seconds (all threads) of one step."""
    del weights
    wall, cpu = time.perf_counter(), time.process_time()
    value = loss()
    value.backward()
    update()
    return {"loss": value.item(), "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def tiny_problem(sizes: dict[str, int]) -> dict[str, Any]:
    """A problem of the given sizes, to load everything a step loads."""
    import torch

    d, n, g, dh = sizes["d"], sizes["n"], sizes["g"], sizes["dh"]
    shapes = {"W_Q": (g, dh, d), "W_K": (g, dh, d), "W_V": (n, d), "W_O": (n, d)}
    shapes |= {"b_Q": (g, dh), "b_K": (g, dh), "b_V": (n,), "b_D": (d,), "x": (1, 8, d), "target": (1, 8, d)}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def plain_gradient(name: str, gradient: Any, sizes: dict[str, int]) -> Any:
    """The gradient in clearhead's layout: W_Q and W_K as [g, dh, d]."""
    if name in ("W_Q", "W_K") and tuple(gradient.shape) == (sizes["g"], sizes["d"], sizes["dh"]):
        gradient = gradient.transpose(1, 2)
    return gradient.contiguous()


def resident_bytes() -> int:
    """Memory in use now."""
    return _status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """Most memory ever in use, since `reset_peak` where the system can forget the past."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Forget the peak of the imports (Linux only)."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5")


def _status(key: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
