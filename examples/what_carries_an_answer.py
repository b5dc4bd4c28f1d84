"""Which tokens and MLPs speak for an answer, which heads carry that, why they look there, and is it so?

python examples/what_carries_an_answer.py                        # clearhead-tiny, a few seconds
python examples/what_carries_an_answer.py smollm2                # a real model
"""

import sys

import torch

from clearhead.circuits.tracing.loadings import split_edge
from clearhead.circuits.tracing.qk import explain_edge
from clearhead.circuits.tracing.readers import read_units
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.circuits.tracing.steer import steer
from clearhead.model import Model
from clearhead.spectral.signals import Firing
from clearhead.spectral.writes import Parts
from clearhead.units import Unit

PROMPT = "When Mary and John went to the store, John gave a drink to"


def main(name: str = "clearhead-tiny") -> None:
    model = Model.load(name)
    tokens = model.tokenize(PROMPT)
    words = model.token_strings(tokens[0].tolist())
    opened = open_prompt(Parts(model), tokens)

    # everything that was written into the stream, as it speaks for the likeliest next token: the sum is its logit
    answer = int(opened.stream.run["logits"][0, -1].argmax())
    target = Unit("logit", index=answer, position=len(opened) - 1)
    reads = read_units(opened, [target])
    edges = reads.edges(opened)[0]
    print(f"{model.token_strings([answer])[0]!r}: {float(edges.sum() + reads.constant[0]):.4f} from units, ", end="")
    print(f"{float(reads.value[0]):.4f} read by the model")
    for place in edges.abs().topk(6).indices.tolist():
        unit = opened.sources.units[place]
        print(f"  {unit.id:24}{words[unit.position or 0]!r:12}{float(edges[place]):+.3f}")

    # the largest of those that lie at another token came through heads: which?
    elsewhere = torch.tensor([unit.position not in (None, target.position) for unit in opened.sources.units])
    place = int((edges.abs() * elsewhere).argmax())
    unit = opened.sources.units[place]
    carried = split_edge(opened, reads, place, 0)
    print(f"{unit.id} {words[unit.position or 0]!r} is carried by")
    for layer, head, query, key, weight in list(zip(*carried, strict=True))[:4]:
        print(f"  head {layer}.{head}, {words[query]!r} → {words[key]!r}: {float(weight):+.3f}")

    # and why does the first of them look there?
    firing = Firing(*(int(column[0]) for column in carried[:4]))
    split = explain_edge(opened, firing, against="mean")
    print(f"its score above the mean key: {split.score:.4f}, from pairs of units: {split.total:.4f}")
    for query, key, weight in split.pairs(4):
        print(f"  {split.units[query].id} × {split.units[key].id}: {weight:+.3f}")

    # without the unit: what its edge predicts, and what is found with everything else held, and with nothing held
    for held in ("everything", "nothing"):
        effect = steer(opened, {unit: 0.0}, [target], held)
        found = f"{float(effect.predicted):+.4f} predicted, {float(effect.measured):+.4f} found"
        print(f"without {unit.id}, {held} held: {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
