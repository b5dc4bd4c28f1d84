"""Lorsa: one head by loops, causality, every activation, exact folding, the exact copy of real attention, files."""

import dataclasses
import json
import math
import resource
import signal

import pytest
import torch

from clearhead.dictionaries.dictionary import record_metrics, save_tensors
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import ACTIVATIONS, Lorsa, LorsaConfig
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.geometry import attention_geometry
from clearhead.model.rope import RopeSpec
from clearhead.model.weights import attention_weights
from tests.model.tiny_configs import CONFIGS, build

D, N, G, C, T = 12, 8, 2, 6, 7


def make(activation="topk", *, k=3, unit_norm=True, **options) -> Lorsa:
    """A float64 Lorsa with random weights in every parameter."""
    rope = RopeSpec(torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64), 1.0, False, 6).to_dict()
    config = LorsaConfig(
        d_model=D, n_heads=N, d_qk=C, k=k, activation=activation, scale=0.4, unit_norm=unit_norm,
        **{"n_groups": G, "rope": rope, **options},
    )  # fmt: skip
    torch.manual_seed(3)
    lorsa = Lorsa(config).double()
    for parameter in lorsa.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    if unit_norm:
        lorsa.normalise_decoder()
    if activation == "batchtopk":
        lorsa.threshold.fill_(0.25)
    return lorsa.eval()


def inputs(b=2) -> torch.Tensor:
    return torch.randn(b, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def rotated(vector: torch.Tensor, position: int, frequencies: list[float]) -> torch.Tensor:
    """Rotation of the half layout, by loops."""
    out, half = vector.clone(), len(frequencies)
    for i, f in enumerate(frequencies):
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(position * f) - b * math.sin(position * f)
        out[i + half] = b * math.cos(position * f) + a * math.sin(position * f)
    return out


@pytest.mark.parametrize("patterns", [1, 2, 4])
@torch.no_grad()
def test_one_head_equals_the_formula_by_loops(patterns):
    lorsa, x = make(patterns_per_group=patterns), inputs(1)
    pre = lorsa.pre_activations(x)[0]
    for head in range(N):
        group = head // (N // G)
        frequencies = lorsa.rope.inv_freq.tolist()
        # one gate per plane: components i and i + 3 turn together
        gate = lorsa.qk_gate[head // (4 // patterns)].repeat(2) if patterns > 1 else torch.ones(C)
        q = [gate * rotated(lorsa.W_Q[group] @ x[0, i] + lorsa.b_Q[group], i, frequencies) for i in range(T)]
        k = [rotated(lorsa.W_K[group] @ x[0, i] + lorsa.b_K[group], i, frequencies) for i in range(T)]
        for i in range(T):
            scores = [0.4 * float(q[i] @ k[j]) for j in range(i + 1)]
            weights = [math.exp(s - max(scores)) for s in scores]
            value = sum(
                w / sum(weights) * float(lorsa.W_V[head] @ x[0, j] + lorsa.b_V[head]) for j, w in enumerate(weights)
            )
            # the rotation's tables are those of transformers, computed in float32
            assert float(pre[i, head]) == pytest.approx(value, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("qk_norm", [None, "rms"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gated_patterns_of_a_group_act_like_groups_of_their_own(interleaved, qk_norm):
    rope = RopeSpec(torch.tensor([1.0, 0.3], dtype=torch.float64), 1.0, interleaved, 4).to_dict()
    options = {"rope": rope, "qk_norm": qk_norm, "qk_norm_eps": 1e-6 if qk_norm else 0.0, "sinks": True}
    lorsa, x = make(patterns_per_group=2, **options), inputs()
    assert lorsa.qk_gate.shape == (4, 4)  # two planes, two components that do not turn
    where = [0, 0, 1, 1, 2, 3] if interleaved else [0, 1, 0, 1, 2, 3]
    apart = make(**options | {"n_groups": 4})
    with torch.no_grad():
        for name, parameter in apart.named_parameters():
            own = lorsa.get_parameter(name)
            parameter.copy_(own if own.shape == parameter.shape else own.repeat_interleave(2, 0))
        if qk_norm:
            apart.q_gain *= lorsa.qk_gate[:, where]
        else:
            apart.W_Q *= lorsa.qk_gate[:, where, None]
            apart.b_Q *= lorsa.qk_gate[:, where]
    torch.testing.assert_close(lorsa.patterns(x), apart.patterns(x), atol=1e-12, rtol=0)
    which = torch.tensor([3, 1])
    torch.testing.assert_close(lorsa.patterns(x, which), apart.patterns(x)[:, which], atol=1e-12, rtol=0)
    gradients = []
    for module in (lorsa, apart):
        module.zero_grad()
        module(x).y.square().sum().backward()
        gradients.append(module.W_K.grad.view(2, -1, C, D).sum(1))
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
    assert lorsa.qk_gate.grad.abs().min() > 0


def test_gates_of_one_leave_the_shared_pattern_and_training_may_write_over_the_copies():
    torch.manual_seed(0)
    shape = LorsaConfig(d_model=D, n_heads=N, n_groups=G, d_qk=C, k=3, scale=0.4)
    shared, gated = Lorsa(shape), Lorsa(dataclasses.replace(shape, patterns_per_group=4))
    for parameter in shared.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    missing = gated.load_state_dict(shared.state_dict(), strict=False)
    assert missing.missing_keys == ["qk_gate"]
    x, gradients = inputs().float(), []
    for module in (shared.train(), gated.train(), gated.eval()):
        module.zero_grad()
        y = module(x).y
        torch.testing.assert_close(y, shared(x).y, atol=1e-5, rtol=1e-5)
        y.square().sum().backward()
        gradients.append([module.W_Q.grad.clone(), module.W_K.grad.clone(), module.W_V.grad.clone()])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_output_is_the_sum_of_the_k_largest_positive_heads():
    lorsa, x = make(k=3), inputs()
    output = lorsa(x)
    for row, y in zip(output.pre.flatten(0, 1), output.y.flatten(0, 1), strict=True):
        kept = sorted(range(N), key=lambda n: float(row[n]), reverse=True)[:3]
        want = lorsa.b_D + sum(max(0.0, float(row[n])) * lorsa.W_O[n] for n in kept)
        torch.testing.assert_close(y, want, atol=1e-12, rtol=0)


def dense_activations(lorsa: Lorsa, x: torch.Tensor) -> torch.Tensor:
    """Every activation by its definition on dense tensors: an independent second reading."""
    pre = lorsa.pre_activations(x)
    norm = lorsa.W_O.norm(dim=-1)
    gate, kind, k = pre * norm, lorsa.config.activation, lorsa.config.k
    if kind == "signed-topk":
        keep = gate.abs() >= gate.abs().sort(-1, descending=True).values[..., k - 1 : k]
    elif kind == "topk":
        keep = (gate >= gate.sort(-1, descending=True).values[..., k - 1 : k]) & (gate > 0)
    elif kind == "batchtopk":
        keep = gate >= lorsa.threshold
    elif kind == "jumprelu":
        keep = gate > lorsa.log_threshold.exp()
    else:
        keep = gate > 0
    return pre * keep


@pytest.mark.parametrize("unit_norm", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_against_its_definition(activation, unit_norm):
    lorsa, x = make(activation, unit_norm=unit_norm), inputs()
    want = dense_activations(lorsa, x)
    codes = lorsa.encode(x)
    dense = torch.zeros_like(want).scatter_add(-1, codes.heads, codes.values)
    torch.testing.assert_close(dense, want, atol=1e-12, rtol=0)
    assert 0 < (want != 0).double().mean() < 1
    y = want @ lorsa.W_O + lorsa.b_D
    torch.testing.assert_close(lorsa.decode(codes), y, atol=1e-12, rtol=0)
    torch.testing.assert_close(lorsa(x).y, y, atol=1e-12, rtol=0)


@pytest.mark.parametrize("patterns", [1, 4])
@pytest.mark.parametrize("activation", ["topk", "signed-topk", "relu"])
def test_gradients_equal_those_of_the_dense_formula(activation, patterns):
    lorsa, x = make(activation, patterns_per_group=patterns), inputs()
    target = torch.randn(2, T, D, dtype=torch.float64)
    gradients = []
    for forward in (lambda: lorsa(x).y, lambda: dense_activations(lorsa, x) @ lorsa.W_O + lorsa.b_D):
        lorsa.zero_grad()
        (forward() - target).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in lorsa.named_parameters()})
    # the second reading gates by |w_o|, so it also differentiates nothing through the gate: both agree exactly
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-10, rtol=1e-10)


def test_future_tokens_change_nothing():
    lorsa, x = make(), inputs()
    changed = x.clone()
    changed[:, 4:] += 1.0
    before, after = lorsa(x), lorsa(changed)
    assert torch.equal(before.pre[:, :4], after.pre[:, :4])
    assert torch.equal(before.y[:, :4], after.y[:, :4])
    assert (before.y[:, 4:] != after.y[:, 4:]).any()


def test_permuting_heads_inside_groups_changes_nothing():
    lorsa, x = make(), inputs()
    y = lorsa(x).y
    order = torch.tensor([2, 0, 3, 1, 7, 6, 5, 4])
    with torch.no_grad():
        for parameter in (lorsa.W_V, lorsa.W_O, lorsa.b_V):
            parameter.copy_(parameter[order].clone())
    torch.testing.assert_close(lorsa(x).y, y, atol=1e-12, rtol=0)


def test_pattern_rows_times_values_equal_the_pre_activation():
    lorsa, x = make(), inputs()
    pattern, values = lorsa.patterns(x), lorsa.values(x)
    groups = torch.arange(N) // (N // G)
    split = pattern[:, groups] * values.mT[:, :, None]
    torch.testing.assert_close(split.sum(-1).mT, lorsa.pre_activations(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("unit_norm", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_folding_the_scales_is_exact(activation, unit_norm):
    lorsa, x = make(activation, unit_norm=unit_norm, patterns_per_group=2), inputs()
    want = lorsa(x * 1.7).y / 0.3
    active = (dense_activations(lorsa, x * 1.7) != 0).sum()
    lorsa.fold_scales(1.7, 0.3)
    torch.testing.assert_close(lorsa(x).y, want, atol=1e-11, rtol=0)
    codes = lorsa.encode(x)
    assert (codes.values != 0).sum() == active


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_unit_norm_form_is_exact(activation):
    lorsa, x = make(activation, unit_norm=False, patterns_per_group=2), inputs()
    twin = lorsa.unit_normed()
    torch.testing.assert_close(twin.W_O.norm(dim=-1), torch.ones(N, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(twin(x).y, lorsa(x).y, atol=1e-11, rtol=0)


EXACT = {
    "llama": "grouped queries",
    "gpt2": "biases, no rotation",
    "gpt_neox": "fused projection, partial rotation",
    "qwen2": "query, key and value biases",
    "qwen3": "query-key norm, heads wider than the model",
    "gemma2": "soft-cap, sliding window, own scale",
    "mistral": "sliding window",
    "gpt_oss": "sinks",
    "gpt_bigcode": "one key-value head",
    "cohere": "interleaved rotation",
    "opt": "scale inside the queries",
    "phi": "partial rotation with biases",
}


@pytest.mark.parametrize("family", EXACT)
def test_exact_copy_of_real_attention(family):
    hf = build(family)
    # transformers' expert layers have no float64 kernel
    model = Model(hf if family == "gpt_oss" else hf.double(), self_test=False)
    tokens = torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    run = model.run(tokens, read=["attn_in.1", "attn_out.1"])
    copy = from_attention(attention_weights(model, 1), attention_geometry(model, 1))
    y = copy(run["attn_in.1"]).y
    torch.testing.assert_close(y, run["attn_out.1"], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_exact_copy_of_a_layer_of_smollm2():
    model = Model.load("smollm2", self_test=False)
    tokens = model.tokenize(
        "The owls of the mill lived where nobody had ground corn since the war, and the owls knew it."
    )
    run = model.run(tokens, read=["attn_in.12", "attn_out.12"])
    copy = from_attention(attention_weights(model, 12), attention_geometry(model, 12))
    y, own = copy(run["attn_in.12"]).y, run["attn_out.12"]
    assert float((y - own).norm() / own.norm()) < 1e-5


@pytest.mark.parametrize(("family", "reason"), [("bloom", "ALiBi"), ("olmo2", "over all heads")])
def test_layers_a_lorsa_cannot_imitate_are_refused(family, reason):
    model = Model(build(family), self_test=False)
    with pytest.raises(ClearheadError, match=reason):
        from_attention(attention_weights(model, 1), attention_geometry(model, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saving_and_loading_keeps_every_bit(activation, tmp_path):
    lorsa, x = make(activation, qk_norm="rms", qk_norm_eps=1e-6, sinks=True, patterns_per_group=2), inputs()
    lorsa.provenance = {"model": "org/name", "layer": 3}
    lorsa.metrics = {"fvu": 0.2}
    lorsa.save_pretrained(tmp_path / "saved")
    back = Lorsa.from_pretrained(tmp_path / "saved").double()
    assert back.config == lorsa.config
    assert back.provenance == lorsa.provenance
    for name, tensor in lorsa.state_dict().items():
        assert torch.equal(tensor.float(), back.state_dict()[name].float()), name
    torch.testing.assert_close(back(x).y, lorsa(x).y, atol=1e-5, rtol=1e-5)
    assert back.metrics == {"fvu": 0.2}
    back.save_pretrained(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "layer 3 of org/name" in card and "| fvu | 0.2 |" in card
    record_metrics(tmp_path / "again", "lorsa", {"l0": 3.0})
    assert Lorsa.from_pretrained(tmp_path / "again").metrics == {"l0": 3.0}


def test_unknown_configuration_keys_are_named(tmp_path):
    make().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    record["config"]["n_head"] = 4
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UnknownNameError, match="did you mean 'n_heads'"):
        Lorsa.from_pretrained(tmp_path)


def test_damaged_files_are_named(tmp_path):
    make().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match="truncated"):
        Lorsa.from_pretrained(tmp_path)
    make(k=2, sinks=True).save_pretrained(tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptFileError, match="sink"):
        Lorsa.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"kind": "lorsa", ')
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        Lorsa.from_pretrained(tmp_path)


def test_a_dictionary_of_another_kind_is_refused(tmp_path):
    make().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | {"kind": "transcoder"}))
    with pytest.raises(ClearheadError, match="holds a 'transcoder'"):
        Lorsa.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 9}, "k = 9 exceeds the number of heads, 8"),
        ({"n_groups": 3}, "cannot be shared evenly by 3"),
        ({"patterns_per_group": 3}, "4 heads cannot share 3 patterns evenly"),
        ({"n_heads": 0}, "n_heads must be at least 1"),
        ({"activation": "topkk"}, "did you mean 'topk'"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ClearheadError, match=message):
        dataclasses.replace(make().config, **change)


def test_missing_folder_says_what_to_give(tmp_path):
    with pytest.raises(ClearheadError, match="there is no folder"):
        Lorsa.from_pretrained(tmp_path / "nowhere")


def test_a_full_disk_is_told_as_one_and_keeps_the_old_file(tmp_path):
    make().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ClearheadError, match="no space left"):
            save_tensors(tmp_path / "model.safetensors", {"large": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_norm_bias_is_refused_not_dropped(monkeypatch):
    monkeypatch.setitem(CONFIGS, "phi", CONFIGS["phi"] | {"qk_layernorm": True})
    model = Model(build("phi"), self_test=False)
    with pytest.raises(ClearheadError, match="norm has a bias"):
        from_attention(attention_weights(model, 1), attention_geometry(model, 1))
