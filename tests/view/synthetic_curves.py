"""Inclusion curves with planted crossings, as `clearhead circuit curve` saves them."""

import json

import numpy as np
import torch

from clearhead.circuits.curves.curve import Curve
from clearhead.circuits.curves.protocol import Protocol
from clearhead.circuits.curves.statistics import Interval
from clearhead.view.curve_page import CurveRun

LAYERS, HEADS = 6, 8
N = LAYERS * HEADS
COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 20, 24, 30, 40, N)


class Planted(Curve):
    """A curve whose intervals are given, since a thousand draws of each would take seconds."""

    def intervals(self, *, by_template, seed=0):
        wide = 2 if by_template else 1
        crossing = None if self.stable is None else Interval(max(0, self.stable - wide), self.stable + wide)
        return {"first": crossing, "stable": crossing, "auc": Interval(self.auc - 0.01, self.auc + 0.01), "max_f": None}


def curve_dict(method, policy, size, seed, *, prompts=12, overshoot=0.0):
    """A curve whose F grows to 1 over `size` components, `overshoot` above it until the last."""
    rng = np.random.default_rng(seed)
    k = np.array(COUNTS, dtype=float)
    shape = np.clip(k / size, 0, 1) + overshoot * (k >= size) * (k < N)
    effect = rng.uniform(2, 4, size=prompts)
    noise = rng.normal(scale=0.08, size=(len(COUNTS), prompts)) * ((k > 0) & (k < N))[:, None]
    primary = -1 + effect * (shape[:, None] + noise)
    values = torch.from_numpy(np.stack([primary, primary / 8, -np.abs(1 - shape)[:, None] * effect, primary > 0], -1))
    names = ranked_names(seed)
    made = Planted(
        method=method,
        policy=policy,
        metric="logit_difference",
        threshold=0.9,
        counts=COUNTS,
        items=tuple(range(40, 40 + prompts)),
        templates=tuple(("</script><b>", "B", "C")[i % 3] for i in range(prompts)),
        values=values.double(),
        first=next(c for c, f in zip(COUNTS, shape, strict=True) if f >= 0.9),
        stable=next(c for c, f in zip(COUNTS, shape, strict=True) if f >= 0.9),
        tied=1,
        complement=0.07,
        circuit=tuple(names[: int(size)]),
    )
    return json.loads(json.dumps(made.to_dict()))


def ranked_names(seed):
    order = np.random.default_rng(seed).permutation(N)
    return [f"head.{place // HEADS}.{place % HEADS}" for place in order]


def protocol(model):
    return Protocol(
        model=model,
        model_note="<b>made up",
        task="ioi",
        level="heads",
        components=str(N),
        ablation="corrupt",
        reference="none",
        rank="exact",
        policy="signed",
        metric="logit_difference",
        threshold=0.9,
        min_effect=0.5,
        ranked_on=tuple(range(20)),
        evaluated_on=tuple(range(40, 52)),
        wrong=(3, 17),
        dropped=(21,),
        refused={"name of two tokens </script>": 4},
        seed=0,
        notes=("MLPs belong to every circuit.",),
    )


def synthetic_run(model="dense", scale=1.0, seed=0):
    curves = [
        curve_dict("exact", "signed", 10 * scale, seed, overshoot=0.15),
        curve_dict("exact", "absolute", 20 * scale, seed),
        curve_dict("atp", "signed", 12 * scale, seed + 1),
        curve_dict("random", "signed", 40, seed + 2),
        curve_dict("random", "signed", 46, seed + 3),
    ]
    values = np.sort(np.random.default_rng(seed).normal(size=N))[::-1]
    scores = {"exact": dict(zip(ranked_names(seed), values.tolist(), strict=True))}
    return CurveRun(f"runs/{model}", protocol(model).to_dict(), curves, scores)
