"""Every recipe is a configuration that this version reads, with the settings its name promises."""

from pathlib import Path

import pytest

from clearhead.config import Sparsify
from clearhead.configfile import from_file

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read(path):
    config = from_file(path)
    assert isinstance(config, Sparsify)
    assert config.precision == "bfloat16" and config.device == "cuda" and config.out is None
    assert config.tolerance in (0.02, 0.04)


def test_the_four_recipes_are_there():
    names = [path.stem.removeprefix("sparsify-") for path in RECIPES]
    assert names == ["gpt2", "llama-3.2-1b", "olmo-7b", "smollm2"]
