"""The addition toy's trainings: losses, the teacher's table, what is kept, exact resume, exported models, controls."""

import dataclasses
import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from clearhead.config import SparsifyToy
from clearhead.data.addition import ANSWER, Addition, addition
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.sparsify.addition import (
    DenseAddition,
    Watch,
    build_model,
    build_tokenizer,
    look_up,
    measure,
    multiplier,
    sparse_settings,
    train_dense,
    train_sparse,
)
from clearhead.sparsify.best import Best
from clearhead.sparsify.task import Sparsification
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.optim import RateSchedule
from tests.sparsify.adding_models import SMALL, few_sums, sparse_adder

SCHEDULE = RateSchedule(steps=1, peak_lr=1.0, warmup=0, decay=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps: the folder of its seed."""
    folder = tmp_path_factory.mktemp("addition")
    train_dense(SMALL, 0, folder / "dense")
    train_sparse(SMALL, 0, folder / "dense", folder / "sparse")
    return folder


def weights(folder) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_only_the_digits_of_the_sum_count():
    model = build_model(SMALL, 0).eval()
    tokens = few_sums().tokens
    loss, _ = DenseAddition(model).loss(model, tokens, SCHEDULE, 0)
    logits = model(input_ids=tokens[:, :-1]).logits[:, 5:]
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), tokens[:, ANSWER].flatten()))


def test_the_divergence_of_a_sparse_step_is_that_of_the_three_digits(trained):
    from clearhead.sparsify.task import prepare

    settings = sparse_settings(SMALL, 0, trained / "dense", None)
    prepared = prepare(settings, "cpu")
    hf, gates = prepared.model.hf, prepared.gates
    tokens = few_sums().tokens
    table = look_up(hf, gates)
    with torch.no_grad(), gates.opened():
        teacher = hf(input_ids=tokens).logits
    torch.testing.assert_close(table(tokens), teacher)
    prepared.base = table
    gates.set_bias(torch.full_like(gates.bias(), 0.5))
    best = Best(dict(hf.named_parameters()), 0.0)
    task = Sparsification(prepared, settings, multiplier(settings), best, None, scored_from=5)
    _, metrics = task.loss(hf, tokens, SCHEDULE, task.soft_steps)  # hard gates
    with torch.no_grad(), gates.hard():
        student = hf(input_ids=tokens).logits
    p, q = (logits[:, 5:8].log_softmax(-1) for logits in (teacher, student))
    torch.testing.assert_close(metrics["kl"], (p.exp() * (p - q)).sum(-1).mean())
    targets = tokens[:, ANSWER].flatten()
    torch.testing.assert_close(metrics["ce"], F.cross_entropy(student[:, 5:8].flatten(0, 1), targets))


def test_the_multiplier_stays_above_where_digits_would_be_given_up_for_edges():
    settings = sparse_settings(SparsifyToy(), 0, SMALL.directory(), None)
    geco = multiplier(settings)
    assert geco.multiplier == pytest.approx(10.0) and geco.target == SparsifyToy().tolerance
    for step in range(1000):
        geco.update(0.0, step)
    assert geco.multiplier == pytest.approx(0.3)


def test_accuracy_and_share_are_those_of_a_count_by_hand():
    model = sparse_adder()
    assert model.gates is not None
    tokens = few_sums().tokens
    right, share = measure(model.hf, tokens, model.gates.hard())
    with torch.no_grad(), model.gates.hard() as tally:
        predicted = model.hf(input_ids=tokens[:, :-1]).logits[:, 5:].argmax(-1)
    by_hand = [p == t for p, t in zip(predicted.tolist(), tokens[:, ANSWER].tolist(), strict=True)]
    assert right == sum(by_hand) / len(by_hand)
    opened = sum(int(layer.opened.sum()) for layer in tally.values())
    assert share == pytest.approx(opened / (36 * 4 * len(tokens))) and 0.1 < share < 0.9


def test_the_kept_state_is_the_sparsest_that_is_right_enough():
    model = sparse_adder()
    gates = model.gates
    assert gates is not None
    best = Best(dict(model.hf.named_parameters()), target=1.0)
    watch = Watch(model.hf, few_sums(), 100, gates, best)
    assert watch(1) == {} and watch.every == 2
    first = watch(2)
    gates.set_bias(gates.bias() + 1)
    more = watch(4)
    assert more["edge_share"] > first["edge_share"] and more["kept_step"] == 2
    gates.set_bias(gates.bias() - 2)
    fewer = watch(100)
    assert fewer["edge_share"] < first["edge_share"] and fewer["kept_step"] == 100
    dense = Watch(build_model(SMALL, 0), few_sums(), 100, None, None)
    assert dense(5) == {} and dense(10).keys() == {"accuracy"}


def test_the_exported_model_is_the_one_that_was_measured(trained):
    summary = json.loads((trained / "sparse" / "summary.json").read_text())
    model = Model.load(str(trained / "sparse" / "model"))
    assert model.gates is not None and model.gates.has_sink
    right, share = measure(model.hf, addition("held_out").tokens, model.gates.hard())
    assert (right, share) == (summary["exact_match"], pytest.approx(summary["edge_share"]))
    by_head = torch.tensor(list(summary["edges_by_head"].values()))
    assert by_head.shape == (2, 2) and float(by_head.mean()) == pytest.approx(summary["edge_share"], abs=1e-6)
    assert model.hf.config.clearhead_gates["base"] == str(trained / "dense" / "model")
    tokens = model.tokenize("37 + 08 =")
    assert tokens[0].tolist() == Addition.of_pairs(torch.tensor([37]), torch.tensor([8])).tokens[0, :6].tolist()
    assert model.hf.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 9)
    assert Model.load(str(trained / "dense" / "model")).gates is None


def test_no_other_character_has_a_token():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer()("37*08")


def test_a_finished_training_is_not_repeated(trained):
    before = weights(trained / "sparse")
    again = train_sparse(SMALL, 0, trained / "dense", trained / "sparse")
    assert again == json.loads((trained / "sparse" / "summary.json").read_text())
    assert weights(trained / "sparse") == before


def test_an_interrupted_training_ends_bitwise_where_an_uninterrupted_one_does(trained, tmp_path, monkeypatch):
    plain, done = Sparsification.finish_step, iter(range(100))

    def stop_after_three(task, accelerator):
        plain(task, accelerator)
        if next(done) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Sparsification, "finish_step", stop_after_three)
        with pytest.raises(KeyboardInterrupt):
            train_sparse(SMALL, 0, trained / "dense", tmp_path)
    assert not (tmp_path / "model").exists() and list_checkpoints(tmp_path)[-1].name == "step-00000003"
    train_sparse(SMALL, 0, trained / "dense", tmp_path)
    assert weights(tmp_path) == weights(trained / "sparse")


def test_the_control_has_random_edges_at_the_density_of_the_sparse_model(trained, tmp_path):
    summary = train_sparse(SMALL, 0, trained / "dense", tmp_path, like=trained / "sparse")
    assert 0 <= summary["exact_match"] <= 1 and "edge_share" not in summary
    control = Model.load(str(tmp_path / "model"))
    assert control.hf.config.clearhead_gates["control"] == "random"
    with pytest.raises(ClearheadError, match="--like"):
        train_sparse(SMALL, 0, trained / "dense", tmp_path / "other", like=tmp_path / "nowhere")


def test_models_of_two_seeds_differ_and_this_processs_random_state_is_kept():
    before = torch.random.get_rng_state()
    first, second = build_model(SMALL, 0), build_model(SMALL, 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first.transformer.wte.weight, second.transformer.wte.weight)
    with pytest.raises(ClearheadError, match="multiple of --heads"):
        dataclasses.replace(SMALL, width=9)
