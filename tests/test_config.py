import dataclasses
import json
from pathlib import Path

import pytest

import clearhead
from clearhead.config import (
    SCHEMA,
    VERBS,
    Analyze,
    BenchLorsa,
    Catalogue,
    CircuitGlobal,
    Convert,
    Evaluate,
    GraphMerge,
    Harvest,
    Replace,
    Steer,
    TrainLorsa,
    View,
    resolve_layer,
    resolve_layers,
)
from clearhead.config.verb import shortened
from clearhead.configfile import differences, from_dict, from_file, refuse_other_run
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError


def example(cls):
    """The verb with its required fields filled in."""
    examples = {"run": Path("runs/x"), "head": 0, "checkpoints": "runs/x", "prompt": "a b", "task": "ioi"}
    examples |= {"traced": Path("runs/x")}
    examples |= dict.fromkeys(("graph", "first", "second"), Path("runs/x/graph"))
    required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    if cls in (Replace, CircuitGlobal):
        return cls(dictionaries=("runs/x/transcoder",))
    if cls is Convert:
        return cls(dictionary=Path("theirs"), model="smollm2")
    if cls is Catalogue:
        return cls(model="smollm2")
    if cls is Steer:
        return cls(traced=Path("runs/x"), turn=("mlp.0@1=0",))
    if cls is GraphMerge:
        return cls(graphs=(Path("a"), Path("b")))
    return cls(**{name: examples[name] for name in required})


@pytest.mark.parametrize("cls", VERBS.values(), ids=VERBS.keys())
def test_every_verb_survives_the_round_trip_through_json(cls):
    config = example(cls)
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("cls", VERBS.values(), ids=VERBS.keys())
def test_every_field_of_every_verb_is_documented(cls):
    import inspect

    source = "".join(inspect.getsource(part) for part in cls.__mro__[:-1])
    for field in dataclasses.fields(cls):
        after = source.split(f"\n    {field.name}: ")[1].splitlines()[1].strip()
        assert after.startswith('"""') and after.rstrip('"').endswith("."), field.name


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainLorsa().k = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_key_names_the_nearest_and_the_version_that_wrote_it():
    with pytest.raises(UnknownNameError) as caught:
        from_dict({"schema": 1, "verb": "train lorsa", "clearhead": "0.9.1", "batch_token": 5}, "runs/x/config.json")
    assert "unknown key 'batch_token'; did you mean 'batch_tokens'?" in str(caught.value)
    assert "runs/x/config.json was written by clearhead 0.9.1" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ([], CorruptFileError, "no integer `schema`"),
        ({"verb": "view"}, CorruptFileError, "no integer `schema`"),
        ({"schema": SCHEMA + 1, "verb": "view"}, CorruptFileError, f"reads up to {SCHEMA}"),
        ({"schema": 1, "verb": "train lorse"}, UnknownNameError, "did you mean 'train lorsa'"),
        ({"schema": 1, "verb": "view"}, CorruptFileError, "lacks run"),
        ({"schema": 1, "verb": "train lorsa", "k": "64"}, CorruptFileError, "k in .* is '64', expected int"),
        ({"schema": 1, "verb": "train lorsa", "k": True}, CorruptFileError, "is True, expected int"),
        ({"schema": 1, "verb": "train lorsa", "bf16": 1}, CorruptFileError, "is 1, expected bool"),
        ({"schema": 1, "verb": "train lorsa", "layer": 1.5}, CorruptFileError, "expected int or str or null"),
        ({"schema": 1, "verb": "train lorsa", "init": "dta"}, CorruptFileError, "did you mean 'data'"),
        ({"schema": 1, "verb": "train lorsa", "k": 0}, ClearheadError, "give a number above 0"),
    ],
)
def test_what_is_no_configuration_is_refused(value, error, says):
    with pytest.raises(error, match=says):
        from_dict(value, "runs/x/config.json")


def test_whole_numbers_are_numbers():
    assert from_dict({"schema": 1, "verb": "train lorsa", "lr": 1}) == TrainLorsa(lr=1.0)


def test_from_file_takes_the_file_or_its_directory(tmp_path):
    config = TrainLorsa(k=7, store=Path("stores/a"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert from_file(tmp_path) == from_file(tmp_path / "config.json") == config


def test_to_dict_says_schema_verb_and_version():
    written = View(run=Path("runs/x")).to_dict()
    expected = {"schema": 1, "verb": "view", "clearhead": clearhead.__version__, "run": "runs/x"} | {
        "against": None,
        "out": None,
    }
    assert written == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"k": 65, "heads": 64}, "--k 65 is not possible: at most all 64 heads"),
        ({"heads": 64, "groups": 10}, "--groups 10 is not possible: it must divide the 64 heads"),
        ({"heads": 64, "groups": 8, "patterns_per_group": 3}, "--patterns-per-group 3 .* the 8 heads of a group"),
        ({"qk_width": 0}, "--qk-width 0"),
        ({"batch_tokens": 500}, "--batch-tokens 500 .* multiple of --context 256"),
        ({"batch_tokens": 128}, "--batch-tokens 128"),
        ({"context": 1}, "--context 1"),
        ({"tokens": 0}, "--tokens 0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"warmup_share": 1.5}, "--warmup-share 1.5 .* between 0 and 1"),
        ({"warmup_share": 0.6, "decay_share": 0.6}, "--warmup-share 0.6 .* more than --decay-share leaves"),
        ({"aux_k": -1}, "--aux-k -1 .* 0 to turn it off"),
        ({"activation": "relu"}, "--l0-weight 0.0 .* nothing else makes relu sparse; begin with --l0-weight 0.5"),
        ({"activation": "jumprelu", "l0_weight": -1.0}, "--l0-weight -1.0"),
        ({"l0_weight": 0.5}, "--l0-weight 0.5 .* topk is sparse by --k; leave this out"),
    ],
)
def test_impossible_trainings_are_refused_with_the_option_to_change(fields, says):
    with pytest.raises(ClearheadError, match=says):
        TrainLorsa(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Evaluate(run=Path("x"), tokens=0),
        lambda: Evaluate(run=Path("x"), downstream_tokens=-1),
        lambda: Analyze(run=Path("x"), top=0),
        lambda: Analyze(run=Path("x"), negatives=-1),
        lambda: BenchLorsa(k=5000),
        lambda: BenchLorsa(groups=63),
    ],
)
def test_impossible_values_of_other_verbs_are_refused(make):
    with pytest.raises(ClearheadError, match="is not possible"):
        make()


def test_jumprelu_and_relu_train_with_a_weight():
    for activation in ("relu", "jumprelu"):
        assert TrainLorsa(activation=activation, l0_weight=0.5).l0_weight == 0.5


def test_resolved_fills_in_what_the_model_decides():
    config = TrainLorsa().resolved(n_layers=30, d_model=576, d_head=64, n_heads=1)
    assert (config.layer, config.heads, config.groups) == (15, 4608, 72)
    assert config.out == Path("runs/smollm2-15-h4608-k64-data")
    assert config.resolved(n_layers=30, d_model=576, d_head=64, n_heads=1) == config


def test_resolved_keeps_what_was_given_and_checks_the_rest():
    config = TrainLorsa(model="org/name", layer=-1, heads=1000, out=Path("runs/mine"))
    resolved = config.resolved(n_layers=4, d_model=32, d_head=64, n_heads=1)
    assert (resolved.layer, resolved.groups, resolved.out) == (3, 10, Path("runs/mine"))
    with pytest.raises(ClearheadError, match="at most all 8 heads"):
        TrainLorsa(k=64).resolved(n_layers=2, d_model=1, d_head=1, n_heads=1)


def test_groups_are_derived_for_every_width():
    for heads in (1, 7, 96, 1000, 4608):
        for d_head in (1, 16, 64, 5000):
            groups = TrainLorsa(heads=heads, k=1).resolved(n_layers=1, d_model=8, d_head=d_head, n_heads=1).groups
            assert groups is not None and heads % groups == 0 and (groups == 1 or heads // groups >= d_head)


def test_derived_groups_leave_room_for_their_patterns():
    config = TrainLorsa(heads=1000, k=1, patterns_per_group=8)
    assert config.resolved(n_layers=1, d_model=8, d_head=64, n_heads=1).groups == 5
    with pytest.raises(ClearheadError, match="--patterns-per-group 7"):
        TrainLorsa(heads=64, k=1, patterns_per_group=7).resolved(n_layers=1, d_model=8, d_head=8, n_heads=1)


def test_every_original_head_gets_a_group():
    assert TrainLorsa(heads=64, k=8).resolved(n_layers=1, d_model=8, d_head=32, n_heads=4).groups == 4


def test_layers_count_from_both_ends_and_no_further():
    assert [resolve_layer(layer, 30) for layer in (None, 0, 29, -1, -30)] == [15, 0, 29, 29, 0]
    for layer in (30, -31):
        with pytest.raises(ClearheadError, match=f"there is no layer {layer}: the model has 30, give 0 to 29"):
            resolve_layer(layer, 30)


def test_several_layers_are_numbers_with_commas_or_all():
    assert resolve_layers("all", 3) == [0, 1, 2] and resolve_layers(5, 30) == [5]
    assert resolve_layers("12, 5,-1,5", 30) == [5, 12, 29]
    with pytest.raises(ClearheadError, match="there is no layer 30"):
        resolve_layers("5,30", 30)
    with pytest.raises(ClearheadError, match="--layer 5,12 names several layers"):
        resolve_layer("5,12", 30)
    for words in ("every", "5;12", "5,", ""):
        with pytest.raises(ClearheadError, match="give a number, several as 5,12,17, or all"):
            TrainLorsa(layer=words)


def test_several_layers_lie_in_one_directory():
    assert Harvest(layer=3).directory(3) == Path("stores/smollm2-3-default")
    assert Harvest(layer="all").directory(3) == Path("stores/smollm2-layers-default/3")
    assert Harvest(layer="3,4", site="mlp", out=Path("a")).directory(3) == Path("a/3")


def test_steps_round_up():
    assert TrainLorsa(tokens=1025, batch_tokens=512).steps() == 3


def test_differences_name_the_fields():
    old, new = TrainLorsa(), TrainLorsa(k=32, out=Path("runs/b"))
    assert differences(old, new) == ["k: 64 -> 32", "out: None -> runs/b"]
    assert differences(old, new, ignore=("out",)) == ["k: 64 -> 32"]
    assert differences(old, TrainLorsa()) == []


def test_a_directory_of_another_run_is_refused(tmp_path):
    config = TrainLorsa(k=7, out=tmp_path)
    refuse_other_run(tmp_path, config)  # nothing there
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"clearhead": "0.0.1"}))
    refuse_other_run(tmp_path, dataclasses.replace(config, k=8))  # it left nothing
    (tmp_path / "metrics.jsonl").touch()
    refuse_other_run(tmp_path, dataclasses.replace(config, device="cpu", out=Path("elsewhere")))
    with pytest.raises(ClearheadError, match=r"another run \(seed: 0 -> 1; k: 7 -> 8\); choose another"):
        refuse_other_run(tmp_path, dataclasses.replace(config, k=8, seed=1))
    refuse_other_run(tmp_path, dataclasses.replace(config, k=8), ("out", "k"))
    with pytest.raises(ClearheadError, match="it is of `clearhead train lorsa`"):
        refuse_other_run(tmp_path, View(run=tmp_path))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("When Mary and John went to the store, John", "when-mary-and-john-went-to-the"),
        ("  Ωmega: it's ", "mega-it-s"),
        ("a" * 40 + " b", "a" * 32),
        ("b " + "a" * 40, "b"),
        ("词语 …", "prompt"),
    ],
)
def test_prompts_name_directories(text, name):
    assert shortened(text) == name
