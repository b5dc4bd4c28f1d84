"""Which few modes make a head look where it looks: the spectral lens on one prompt, then on a task with controls.

python examples/why_does_this_head_look_there.py                        # clearhead-tiny, a few seconds
python examples/why_does_this_head_look_there.py smollm2                # a real model
"""

import sys

from clearhead.model import Model
from clearhead.spectral.census import take_census
from clearhead.spectral.firings import Prompts
from clearhead.spectral.judging import compare_all, judge_all
from clearhead.spectral.look import look
from clearhead.spectral.record import summarise

PROMPT = "When Mary and John went to the store, John gave a drink to"


def main(name: str = "clearhead-tiny") -> None:
    model = Model.load(name)

    # one text: every head that looks somewhere, sparsest first
    seen = look(model, PROMPT)
    for firing in seen.firings()[:8]:
        print(firing)

    # several texts: is a head sparser than itself in another basis?
    texts = [
        PROMPT.replace("Mary", a).replace("John", b) for a, b in [("Anna", "Paul"), ("Tom", "Lisa"), ("Sam", "Kate")]
    ]
    prompts = Prompts(texts, [model.tokenize(text)[0].cpu() for text in texts], "three prompts")
    census = take_census(model, prompts)
    separations = compare_all(model, prompts, census, draws=1000, seed=0, untrained=False)
    judged = judge_all(census, separations)
    summary = summarise(census, separations, judged)
    print({key: summary[key] for key in ("heads", "firings", "verdicts", "sparsity_of_heads")})
    for (layer, head), found in list(separations.items())[:4]:
        gauge = found["gauge"]
        print(
            f"head {layer}.{head}: S {judged.numbers[layer, head].sparsity:.3f}, in rotated bases {gauge.sparsity:.3f} "
            f"(difference {gauge.low:+.3f} to {gauge.high:+.3f}, p {gauge.p:.3f}): {judged.verdicts[layer, head]}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
