"""What the recipes for one GPU would cost: memory and hours by arithmetic, from the sizes of the models. Not measured.

python examples/recipe_cost.py

memory   weights x 4 bytes (twice where a frozen base stands beside a model that is trained whole); trained
         parameters x 16 (gradient, two moments of Adam, the best state kept); a step's activations in bfloat16,
         batch tokens x layers x 24 widths x 2, and its logits, batch tokens x 4 vocabularies x 4
FLOP     per token and parameter: 2 for each forward pass, 4 for a backward pass (2 through frozen weights), and
         attention, 12 layers x width x context / 2 per token in a forward and backward pass
hours    at 300 TFLOP/s: a card of 1,000 dense bfloat16 TFLOP/s, three tenths of which are reached
"""

import json
from pathlib import Path

REACHED = 300e12
SIZES = {
    # parameters, layers, width, vocabulary, parameters per unit of LoRA rank (inputs + outputs of all projections)
    "gpt2": (124e6, 12, 768, 50_257, 0),
    "smollm2": (135e6, 30, 576, 49_152, 0),
    "llama-3.2-1b": (1.24e9, 16, 2048, 128_256, 16 * (3 * (2048 + 8192) + 2 * (2048 + 2048) + 2 * (2048 + 512))),
    "olmo-7b": (6.9e9, 32, 4096, 50_304, 32 * (3 * (4096 + 11_008) + 4 * (4096 + 4096))),
}


def cost(name: str, recipe: dict) -> str:
    """One line of the table."""
    parameters, layers, width, vocabulary, per_rank = SIZES[name]
    rank, tokens, batch = recipe["lora"], recipe["tokens"], recipe["batch_tokens"]
    needs_base = recipe["distill"] > 0 or recipe["constraint"] != "ce"
    trained = rank * per_rank if rank else parameters
    copies = 2 if needs_base and not rank else 1
    state = (copies * parameters + (trained if rank else 0)) * 4 + trained * 16
    step = batch * (layers * 24 * width * 2 + 4 * vocabulary * 4)
    passes = (4 if rank else 6) + (2 if needs_base else 0)
    attention = 12 * layers * width * recipe["context"] / 2 * (4 / 3 if needs_base else 1)
    flop = tokens * (passes * (parameters + (trained if rank else 0)) + attention)
    return (
        f"{name:14s} {trained / 1e6:8.0f} M {tokens / batch:9,.0f} steps {(state + step) / 2**30:7.0f} GiB"
        f" {flop / REACHED / 3600:7.1f} h"
    )


def main() -> None:
    """Print the table."""
    print("model          trained     steps            memory    hours     (arithmetic, not measured)")
    for path in sorted((Path(__file__).parents[1] / "recipes").glob("sparsify-*.json")):
        print(cost(path.stem.removeprefix("sparsify-"), json.loads(path.read_text())))


if __name__ == "__main__":
    main()
