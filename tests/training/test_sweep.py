"""A grid of trainings: equal sizes, the same tokens, names, and what is refused."""

import dataclasses

import pytest

from clearhead.config import TrainSweep
from clearhead.errors import ClearheadError
from clearhead.training.sweep import plan_sweep, train


@pytest.fixture
def sweep(short, tmp_path):
    shared = {field: getattr(short, field) for field in ("model", "text", "context", "device", "layer")}
    return TrainSweep(**shared, kinds=("lorsa", "sae", "transcoder"), heads=(64,), k=(4,), tokens=256, out=tmp_path)


def test_kinds_of_one_size_have_as_many_parameters_as_their_modules(sweep, tiny):
    planned = plan_sweep(dataclasses.replace(sweep, heads=(128, 64), k=(4, 8), seeds=(0, 1)), tiny)
    assert len(planned) == 3 * 2 * 2 * 2 and len({one.name for one in planned}) == len(planned)
    assert len({one.directory for one in planned}) == len(planned)
    for lorsa, sae, transcoder in zip(planned[::3], planned[1::3], planned[2::3], strict=True):
        assert [one.kind for one in (lorsa, sae, transcoder)] == ["lorsa", "sae", "transcoder"]
        assert sae.units == transcoder.units and abs(sae.parameters - lorsa.parameters) <= tiny.d_model + 1
        assert len({(one.config.k, one.config.seed, one.config.tokens) for one in (lorsa, sae, transcoder)}) == 1


def test_runs_are_ordinary_ones_and_are_not_repeated(sweep, tiny):
    planned = plan_sweep(sweep, tiny)
    assert not any(one.finished() for one in planned)
    for one in planned:
        summary = train(one)
        assert summary["parameters"] == one.parameters and summary["tokens"] == 256
        assert one.finished()
    with pytest.raises(ClearheadError, match="holds another run"):
        plan_sweep(dataclasses.replace(sweep, tokens=512), tiny)[0].finished()


def test_a_budget_of_parameters_chooses_the_heads(sweep, tiny):
    sizes = {
        one.kind: one.parameters for one in plan_sweep(dataclasses.replace(sweep, heads=(), parameters=(40_000,)), tiny)
    }
    assert all(abs(size - 40_000) < 0.25 * 40_000 for size in sizes.values())
    with pytest.raises(ClearheadError, match="the nearest Lorsa of this layer has"):
        plan_sweep(dataclasses.replace(sweep, heads=(), parameters=(10,)), tiny)


def test_bad_grids_are_refused(sweep, tiny, tmp_path):
    with pytest.raises(ClearheadError, match="not both"):
        dataclasses.replace(sweep, parameters=(1000,))
    with pytest.raises(ClearheadError, match="name at least one"):
        dataclasses.replace(sweep, k=())
    with pytest.raises(ClearheadError, match="there is no layer"):
        plan_sweep(dataclasses.replace(sweep, layer=7), tiny)
    with pytest.raises(ClearheadError, match="holds none of layer 1"):
        plan_sweep(dataclasses.replace(sweep, store=tmp_path), tiny)
    with pytest.raises(ClearheadError, match="at most all 64"):
        plan_sweep(dataclasses.replace(sweep, k=(65,)), tiny)
