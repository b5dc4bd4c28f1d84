"""Post-training: exact resume, what is kept, exported models, adapters, controls, and refusals."""

import dataclasses
import json
import math

import pytest
import torch

from clearhead.config import Pretrain, Sparsify
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.gates import install
from clearhead.runs import read_json
from clearhead.sparsify import posttrain as posttrain_module
from clearhead.sparsify.adapters import add_adapters, merge_adapters, without_adapters
from clearhead.sparsify.best import Best, edges_per_query, measure_hard
from clearhead.sparsify.calibrate import mean_loss, opening_bias
from clearhead.sparsify.posttrain import open_held_out, posttrain, time_steps
from clearhead.sparsify.scratch import gated_settings, pretrain_gated
from clearhead.sparsify.task import Sparsification
from clearhead.training.checkpoint import list_checkpoints
from tests.model.tiny_configs import build
from tests.training.conftest import TINY


def weights(config: Sparsify) -> bytes:
    return (config.directory() / "model" / "model.safetensors").read_bytes()


def metrics(config: Sparsify) -> list[dict]:
    rows = [json.loads(line) for line in (config.directory() / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("tokens_per_second", "time")} for row in rows]


def interrupt_after(monkeypatch, steps: int) -> None:
    """Stops the run as Ctrl-C would, after so many steps of this process."""
    done = iter(range(10**9))
    plain = Sparsification.finish_step

    def finish(task, accelerator):
        plain(task, accelerator)
        if next(done) + 1 == steps:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Sparsification, "finish_step", finish)


@pytest.mark.parametrize("options", [{}, {"lora": 2, "constraint": "paired", "sink": True}])
def test_an_interrupted_run_ends_bitwise_where_an_uninterrupted_one_does(short, tmp_path, monkeypatch, options):
    whole = dataclasses.replace(short, **options)
    summary = posttrain(whole)
    halves = dataclasses.replace(whole, out=tmp_path / "halves")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            posttrain(halves)
    assert len(list_checkpoints(halves.directory())) > 0
    again = posttrain(halves)
    assert weights(whole) == weights(halves)
    assert metrics(whole) == metrics(halves)
    volatile = ("tokens_per_second", "train_seconds", "peak_memory_bytes")
    for key in volatile:
        summary.pop(key), again.pop(key)
    assert summary == again


def test_edges_close_and_the_exported_model_is_the_one_that_was_measured(short):
    config = dataclasses.replace(short, tokens=40 * 128)
    summary = posttrain(config)
    assert summary["within_tolerance"] and summary["edge_share"] < 0.9 * metrics(config)[0]["held_out_edges"]
    model = Model.load(str(config.directory() / "model"))
    held_out = open_held_out(config.resolved(), model)
    assert model.gates is not None
    ce, shares = measure_hard(model, model.gates.hard, held_out)
    assert ce == pytest.approx(summary["hard_ce"], rel=1e-6)
    assert float(shares.mean()) == pytest.approx(summary["edge_share"], rel=1e-6)
    assert mean_loss(model, held_out) == pytest.approx(ce, rel=1e-6)
    tokens = model.tokenize("The old mill")
    assert model.hf.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] == tokens.shape[1] + 3
    assert model.hf.config.clearhead_gates["base"] == str(TINY)
    by_head = torch.tensor(list(summary["edges_by_head"].values()))
    torch.testing.assert_close(by_head, shares.float())


def test_a_larger_number_of_tokens_continues_a_finished_run(short):
    posttrain(short)
    longer = posttrain(dataclasses.replace(short, tokens=18 * 128))
    assert longer["steps"] == 18
    assert read_json(short.directory() / "config.json")["tokens"] == 18 * 128
    assert [row["step"] for row in metrics(short)] == sorted({row["step"] for row in metrics(short)})


def test_the_base_with_adapters_is_the_model_without_them_and_merging_changes_no_output():
    for name in ("llama", "gpt2"):
        hf = build(name).eval()
        tokens = torch.arange(2, 20)[None]
        base = hf(tokens).logits
        trained = add_adapters(hf, rank=3, seed=1)
        assert {parameter.requires_grad for parameter in trained} == {True}
        assert sum(part.numel() for part in hf.parameters() if part.requires_grad) == sum(p.numel() for p in trained)
        torch.testing.assert_close(hf(tokens).logits, base)  # B is zero at first
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in trained:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        adapted = hf(tokens).logits
        assert (adapted - base).abs().max() > 0.1
        with without_adapters(hf):
            assert torch.equal(hf(tokens).logits, base)
        assert all(parameter.requires_grad for parameter in trained)
        merge_adapters(hf)
        torch.testing.assert_close(hf(tokens).logits, adapted, rtol=1e-4, atol=1e-4)
        assert not [key for key in hf.state_dict() if "lora" in key or "base_layer" in key]


def test_adapters_are_drawn_from_the_seed_alone():
    drawn = []
    for seed in (1, 1, 2):
        torch.randn(3)
        drawn.append(add_adapters(build("llama"), rank=2, seed=seed)[0].detach().clone())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_opening_biases_let_the_asked_share_of_mass_through():
    model = Model(build("mistral"), self_test=False)  # a family with a window
    gates = install(model)
    blocks = torch.randint(2, 90, (6, 24), generator=torch.Generator().manual_seed(0))
    gates.set_bias(opening_bias(model, gates, blocks, kept=0.99))
    for layer, gate in gates.layers.items():
        with gates.opened():
            run = model.run(blocks, read=[f"scores.{layer}", f"pattern.{layer}"])
        scores, pattern = run[f"scores.{layer}"], run[f"pattern.{layer}"]
        kept = (pattern * (scores + gate.bias[:, None, None]).sigmoid()).sum((0, 2, 3)) / pattern.sum((0, 2, 3))
        torch.testing.assert_close(kept, torch.full_like(kept, 0.99), rtol=0, atol=1e-4)


def test_the_kept_state_has_the_fewest_edges_within_the_target_else_the_smallest_loss():
    parameter = torch.nn.Parameter(torch.zeros(1))
    best = Best({"w": parameter}, target=1.0)
    offers = [(0, 3.0, 0.9, True), (1, 2.0, 0.95, True), (2, 2.5, 0.1, False), (3, 0.9, 0.99, True)]
    offers += [(4, 0.5, 0.999, False), (5, 1.0, 0.5, True), (6, 1.1, 0.01, False), (7, 0.2, 0.5, False)]
    for step, ce, edges, kept in offers:
        with torch.no_grad():
            parameter.fill_(step)
        assert best.offer(step, ce, edges) == kept
    other = Best({"w": parameter}, target=1.0)
    other.load_state(best.state())
    other.restore()
    assert (other.step, other.ce, other.edges, float(parameter.detach())) == (5, 1.0, 0.5, 5.0)


def test_controls_train_on_the_same_tokens_without_a_price(short, tmp_path):
    sparse = dataclasses.replace(short, out=tmp_path / "sparse")
    posttrain(sparse)
    dense = posttrain(dataclasses.replace(short, control="dense", out=tmp_path / "dense"))
    assert dense["edge_share"] == 1.0 and dense["kept_step"] >= 0
    lots = dataclasses.replace(short, control="random", like=sparse.directory(), out=tmp_path / "random")
    random = posttrain(lots)
    assert random["text_sha256"] == dense["text_sha256"]
    for config, summary in ((dataclasses.replace(short, out=tmp_path / "dense"), dense), (lots, random)):
        exported = Model.load(str(config.directory() / "model"))
        assert mean_loss(exported, open_held_out(config, exported)) == pytest.approx(summary["hard_ce"], rel=1e-6)
    assert math.isfinite(random["hard_ce"]) and random["hard_ce"] != dense["hard_ce"]
    assert random["edge_share"] == pytest.approx(read_json(sparse.directory() / "summary.json")["edge_share"])
    with pytest.raises(ClearheadError, match="no finished run"):
        posttrain(dataclasses.replace(lots, like=tmp_path, out=tmp_path / "again"))


def test_what_cannot_be_continued_is_refused(short, monkeypatch):
    posttrain(short)
    with pytest.raises(ClearheadError, match="seed"):
        posttrain(dataclasses.replace(short, seed=1))
    with pytest.raises(ClearheadError, match="trained for more than --tokens 768"):
        posttrain(dataclasses.replace(short, tokens=6 * 128))
    with pytest.raises(ClearheadError, match="already holds a run"):
        posttrain(dataclasses.replace(short, resume=False))
    plain = posttrain_module.build
    monkeypatch.setattr(posttrain_module, "build", lambda *given: plain(*given[:5], 2))
    with pytest.raises(ClearheadError, match="trained by 1 processes and 2 would continue it"):
        posttrain(dataclasses.replace(short, tokens=18 * 128))


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_what_was_saved(short, monkeypatch):
    plain = Sparsification.loss

    def broken(task, forward, batch, schedule, step):
        loss, found = plain(task, forward, batch, schedule, step)
        return (loss * math.nan if step == 6 else loss), found

    monkeypatch.setattr(Sparsification, "loss", broken)
    with pytest.raises(NonFiniteError, match="step 6"):
        posttrain(short)
    assert list_checkpoints(short.directory())


def test_settings_that_cannot_be_are_refused(short):
    for change, message in (
        ({"tolerance": -0.1}, "--tolerance -0.1 is not possible"),
        ({"precision": "float16"}, "underflow in float16"),
        ({"context": 48, "batch_tokens": 128}, "multiple of --context 48"),
        ({"control": "random"}, "takes its density from a finished run"),
        ({"like": TINY}, "only --control random"),
        ({"budget": 0.1}, "has no budget"),
        ({"warmup_share": 0.6, "settle_share": 0.6}, "leaves less"),
    ):
        with pytest.raises(ClearheadError, match=message):
            dataclasses.replace(short, **change)
    with pytest.raises(ClearheadError, match="reads at most 128 tokens"):
        posttrain(dataclasses.replace(short, context=256, batch_tokens=256))


@pytest.mark.parametrize(
    "options", [{"penalty": "head-budget", "budget": 0.2}, {"penalty": "tiles"}, {"length_weight": 3.0}]
)
def test_other_prices_push_edges_down_too(short, options):
    summary = posttrain(dataclasses.replace(short, tokens=30 * 128, **options))
    assert summary["edge_share"] < 0.9 * metrics(short)[0]["held_out_edges"]


def test_a_model_is_pretrained_through_gates_and_closes_them_below_the_target(books, tmp_path):
    torch.set_num_threads(1)
    config = Pretrain(
        layers=1,
        width=16,
        heads=2,
        vocabulary=280,
        context=16,
        text=str(books),
        tokens=60 * 64,
        batch_tokens=64,
        lr=1e-2,
        repeat_share=0.0,
        gates=True,
        target=3.2,
        device="cpu",
        out=tmp_path / "run",
    )
    summary = pretrain_gated(config)
    rows = [row for row in metrics(gated_settings(config, tmp_path)) if "multiplier" in row]
    assert rows[0]["ce"] > 3.2 > summary["hard_ce"] and summary["within_tolerance"]
    assert rows[-1]["multiplier"] < rows[0]["multiplier"] or summary["edge_share"] < 0.99
    assert Model.load(str(tmp_path / "run" / "sparse" / "model")).gates is not None


def test_a_plan_measures_a_few_steps_and_writes_nothing(short):
    sizes, rate = time_steps(short.resolved(), 1)
    assert rate > 0 and sizes["gates"] == 8 and sizes["trained"] == sizes["parameters"]
    assert not short.directory().exists()


def test_edges_per_query_know_of_windows():
    model = Model(build("mistral"), self_test=False)
    window = model.geometry(0).window
    assert window is not None and window < 24
    rows = [min(i + 1, window) for i in range(24)]
    assert edges_per_query(model, torch.ones(model.n_layers, model.n_heads), 24) == pytest.approx(sum(rows) / 24)
