import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from clearhead.errors import ClearheadError
from clearhead.model.from_gguf import convert

D, HEADS, KV_HEADS, WIDTH, HIDDEN, LAYERS = 64, 4, 2, 16, 96, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]


def _write_gguf(path, *, architecture="llama", pre="smollm", extra: str | None = None, tied: bool = True) -> None:
    """A Llama of two layers with random weights, quantised as SmolLM2's are."""
    rng = np.random.default_rng(0)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = CONTROL + bytes_ + [merge.replace(" ", "") for merge in MERGES]
    tokens += [f"unused{number}" for number in range(-len(tokens) % 32)]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, rows: int, columns: int, kind: GGMLQuantizationType) -> None:
        value = rng.standard_normal((rows, columns), dtype=np.float32) * 0.2
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), D, GGMLQuantizationType.Q8_0)
    if not tied:
        add("output.weight", len(tokens), D, GGMLQuantizationType.Q8_0)
    sizes = {
        "attn_q": (HEADS * WIDTH, D),
        "attn_k": (KV_HEADS * WIDTH, D),
        "attn_v": (KV_HEADS * WIDTH, D),
        "attn_output": (D, HEADS * WIDTH),
        "ffn_gate": (HIDDEN, D),
        "ffn_up": (HIDDEN, D),
        "ffn_down": (D, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, size in sizes.items():
            add(f"blk.{layer}.{name}.weight", *size, GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.random(D, dtype=np.float32))
    writer.add_tensor("output_norm.weight", rng.random(D, dtype=np.float32))
    if extra:
        writer.add_tensor(extra, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    _write_gguf(folder / "tiny.gguf")
    (folder / "hf").mkdir()
    convert(folder / "tiny.gguf", folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_logits_equal_the_loader_of_transformers(tmp_path, tied):
    _write_gguf(tmp_path / "tiny.gguf", tied=tied)
    convert(tmp_path / "tiny.gguf", tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert ours.dtype == torch.float32
    expected = theirs.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)


def test_two_conversions_are_equal_byte_for_byte(converted, tmp_path):
    convert(converted.parent / "tiny.gguf", tmp_path)
    files = sorted(path.name for path in converted.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / name).read_bytes() == (converted / name).read_bytes()


def test_the_tokenizer_splits_digits_and_merges_words(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    # "1 2" is a merge of the vocabulary, and digits stay apart all the same
    assert tokenizer.tokenize("hell w 12") == ["hell", "Ġw", "Ġ", "1", "2"]
    for text in ("def f(x):\n    return x + 12  # é\n", "\ta  b\r\n日本語"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("a<|im_end|>").input_ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.bos_token_id == 1
    assert tokenizer("").input_ids == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "gpt2"}, "general.architecture = 'gpt2'; only 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre = 'llama-bpe'; only 'smollm'"),
        ({"extra": "blk.0.attn_q.bias"}, "GGUF tensor 'blk.0.attn_q.bias'"),
        ({"extra": "rope_freqs.weight"}, "GGUF tensor 'rope_freqs.weight'"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, options, words):
    _write_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(ClearheadError, match=words):
        convert(tmp_path / "other.gguf", tmp_path)
