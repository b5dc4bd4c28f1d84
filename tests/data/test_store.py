import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from clearhead.data import store as store_module
from clearhead.data.harvest import LiveActivations, batches
from clearhead.data.store import ActivationStore, store_of_layer, write_store, write_stores
from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from clearhead.runs import RunDirectory, read_json, write_json

# 16 tokens x 2 x 128 numbers of 4 bytes and 8-byte ids: three blocks of 16,512 bytes to a shard
SHARD = 50_000


@pytest.fixture
def source(model, make_blocks):
    return LiveActivations(model, make_blocks(10), 1)


@pytest.fixture
def written(source, tmp_path):
    return write_store(tmp_path / "store", source, shard_bytes=SHARD)


def _equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_store_serves_what_the_model_computes(source, written):
    assert _equal(written.batch([7, 0, 9, 7]), source.batch([7, 0, 9, 7]))
    assert (len(written), written.context, written.d) == (10, 16, 128)
    assert [shard["blocks"] for shard in written.index["shards"]] == [3, 3, 3, 1]
    reopened = ActivationStore(written.path)
    assert _equal(reopened.batch(torch.arange(10)), source.batch(range(10)))


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_short_formats_round_and_are_read_as_float32(source, tmp_path, dtype, bits):
    stored = write_store(tmp_path / "short", source, dtype=dtype).batch([3])
    exact = source.batch([3])
    assert stored.x.dtype == torch.float32
    assert torch.equal(stored.tokens, exact.tokens)
    torch.testing.assert_close(stored.x, exact.x, rtol=2.0**-bits, atol=1e-6)
    assert not torch.equal(stored.x, exact.x)


def test_the_index_says_what_was_harvested(written):
    index = read_json(written.path / "index.json")
    assert (index["model"], index["layer"], index["text"]) == ("clearhead-tiny", 1, "made")
    assert index["sites"] == ["attn_in.1", "attn_out.1"]


def test_a_finished_store_is_not_computed_again(source, written, monkeypatch):
    monkeypatch.setattr(store_module, "batches", lambda *_: pytest.fail("computed again"))
    write_store(written.path, source, shard_bytes=SHARD)


def test_an_interrupted_harvest_continues(source, written, tmp_path, monkeypatch):
    calls = []

    def interrupt(sources, chosen):
        calls.append(chosen)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return batches(sources, chosen)

    monkeypatch.setattr(store_module, "batches", interrupt)
    other = tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        write_store(other, source, shard_bytes=SHARD)
    with pytest.raises(ClearheadError, match="interrupted after 6 of 10 blocks"):
        ActivationStore(other)
    calls[:] = [None] * 3
    write_store(other, source, shard_bytes=SHARD)
    assert [int(chosen[0]) for chosen in calls[3:]] == [6, 9]
    assert _files(other) == _files(written.path)


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


KILLED = """
import sys, time, torch
from clearhead.data import store
from clearhead.data.harvest import LiveActivations, batches
from clearhead.data.text import TokenBlocks
from clearhead.model.access import Model
model = Model.load("clearhead-tiny", self_test=False)
tokens = torch.randint(1, 1024, (10, 16), generator=torch.Generator().manual_seed(0))
zeros = torch.zeros(10, dtype=torch.int64)
blocks = TokenBlocks(tokens, zeros, zeros[:1], ["made"], "made", "train", 0, "hash of seed 0, 10")
def slow(sources, chosen):
    time.sleep(0.5)
    return batches(sources, chosen)
store.batches = slow
store.write_store(sys.argv[1], LiveActivations(model, blocks, 1), shard_bytes=50_000)
"""


def test_a_killed_harvest_continues_and_equals_an_uninterrupted_one(source, written, tmp_path):
    path = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (path / "index.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (path / ".shard-00001.safetensors.999.part").write_bytes(b"half a shard")
    n_whole = len(read_json(path / "index.json")["shards"])
    assert 1 <= n_whole < 4
    store = write_store(path, source, shard_bytes=SHARD)
    assert _files(path) == _files(written.path)
    assert _equal(store.batch(range(10)), source.batch(range(10)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": 0}, "layer 1, not 0"),
        ({"seed": 5}, "text_sha256 'hash of seed 0, 10', not 'hash of seed 5, 10'"),
        ({"n": 9}, "blocks 10, not 9"),
        ({"model": "another"}, "model 'clearhead-tiny', not 'another'"),
        ({"dtype": "float16"}, "dtype 'float32', not 'float16'"),
    ],
)
def test_another_harvest_does_not_write_into_a_store(model, make_blocks, written, monkeypatch, change, words):
    monkeypatch.setattr(model, "name", change.get("model", model.name))
    blocks = make_blocks(change.get("n", 10), seed=change.get("seed", 0))
    source = LiveActivations(model, blocks, change.get("layer", 1))
    before = _files(written.path)
    with pytest.raises(ClearheadError, match=words):
        write_store(written.path, source, shard_bytes=SHARD, dtype=change.get("dtype", "float32"))
    assert _files(written.path) == before


def test_check_compares_model_layer_and_text(written):
    written.check(model="clearhead-tiny", layer=1)
    written.check(model="clearhead-tiny", layer=1, text_sha256="hash of seed 0, 10")
    with pytest.raises(ClearheadError, match="model 'clearhead-tiny', not 'smollm2'; layer 1, not 12"):
        written.check(model="smollm2", layer=12)
    with pytest.raises(ClearheadError, match="text_sha256 .* not 'other'"):
        written.check(model="clearhead-tiny", layer=1, text_sha256="other")


def test_a_store_of_a_version_without_repeats_holds_none(written):
    index = read_json(written.path / "index.json")
    assert index.pop("repeat_share") == 0.0
    write_json(written.path / "index.json", index)
    earlier = ActivationStore(written.path)
    earlier.check(model="clearhead-tiny", layer=1, repeat_share=0.0)
    with pytest.raises(ClearheadError, match="repeat_share 0.0, not 0.25"):
        earlier.check(model="clearhead-tiny", layer=1, repeat_share=0.25)


def test_check_compares_sites_dtype_and_revision(written):
    written.check(model="clearhead-tiny", layer=1, dtype=torch.float32, revision="a")  # a local model records none
    with pytest.raises(ClearheadError, match="model_dtype 'float32', not 'bfloat16'"):
        written.check(model="clearhead-tiny", layer=1, dtype=torch.bfloat16)
    index = read_json(written.path / "index.json")
    write_json(written.path / "index.json", index | {"sites": ["mlp_in.1", "mlp_out.1"], "model_revision": "b"})
    other = ActivationStore(written.path)
    with pytest.raises(ClearheadError, match="sites .*'mlp_in.1'.*, not .*'attn_in.1'.*; model_revision 'b', not 'a'"):
        other.check(model="clearhead-tiny", layer=1, revision="a")


def test_two_processes_do_not_write_one_store(source, tmp_path):
    with RunDirectory(tmp_path / "store"), pytest.raises(ClearheadError, match="another process is writing"):
        write_store(tmp_path / "store", source)


def test_a_truncated_shard_is_named_on_opening(written):
    shard = written.path / "shard-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"shard-00002.safetensors has 49,\d+ bytes.*Delete .*harvest again"):
        ActivationStore(written.path)


def test_a_missing_shard_is_named_on_opening(written):
    (written.path / "shard-00000.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"shard-00000.safetensors is missing"):
        ActivationStore(written.path)


@pytest.mark.parametrize("place", [3, -1])
def test_an_altered_shard_is_named_on_first_touch(source, written, place):
    shard = written.path / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    store = ActivationStore(written.path)
    assert _equal(store.batch([0, 2, 9]), source.batch([0, 2, 9]))
    with pytest.raises(CorruptFileError, match=r"shard-00001.safetensors is not what was written"):
        store.batch([0, 4])


@pytest.mark.parametrize("content", ["{", '{"schema": 99, "shards": []}', "[]"])
def test_a_damaged_index_is_corrupt(source, written, content):
    (written.path / "index.json").write_text(content)
    for use in (lambda: ActivationStore(written.path), lambda: write_store(written.path, source)):
        with pytest.raises(CorruptFileError, match=r"index.json"):
            use()


def test_a_directory_without_a_store_is_named(tmp_path):
    with pytest.raises(ClearheadError, match="is no activation store.*clearhead harvest"):
        ActivationStore(tmp_path)


@pytest.fixture
def largest_file():
    """Limit the size of files this process may write, as a full quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


def test_a_full_disk_keeps_what_is_written(source, tmp_path, monkeypatch, largest_file):
    written_shards = []
    write = store_module._write_shard

    def run_out(path, number, parts):
        if number == 2:
            largest_file(20_000)
        written_shards.append(number)
        return write(path, number, parts)

    monkeypatch.setattr(store_module, "_write_shard", run_out)
    path = tmp_path / "store"
    with pytest.raises(ClearheadError, match="no space left on the disk .*shard-00002.* was not written"):
        write_store(path, source, shard_bytes=SHARD)
    largest_file(None)
    assert sorted(file for file in os.listdir(path) if file != ".lock") == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    monkeypatch.setattr(store_module, "_write_shard", write)
    store = write_store(path, source, shard_bytes=SHARD)
    assert _equal(store.batch(range(10)), source.batch(range(10)))


def test_float16_refuses_what_it_cannot_hold(source, tmp_path, monkeypatch):
    def grow(sources, chosen):
        result = batches(sources, chosen)
        result[0].y[0, 3, 2] = 70_000.0
        return result

    monkeypatch.setattr(store_module, "batches", grow)
    with pytest.raises(NonFiniteError, match="attn_out.1 is inf in block 0 .*position 3.*float16 cannot hold it"):
        write_store(tmp_path / "half", source, dtype="float16")
    write_store(tmp_path / "brain", source, dtype="bfloat16")


def test_several_layers_come_from_one_forward_and_equal_what_each_gives_alone(
    model, source, written, make_blocks, tmp_path
):
    below = LiveActivations(model, make_blocks(10), 0)
    runs, run = [], model.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "run", lambda tokens, read: runs.append(read) or run(tokens, read=read))
        stores = write_stores({tmp_path / "0": below, tmp_path / "1": source}, shard_bytes=SHARD)
    assert [store.index["layer"] for store in stores] == [0, 1]
    assert _files(tmp_path / "1") == _files(written.path)
    assert _equal(stores[0].batch([7, 0]), below.batch([7, 0]))
    assert store_of_layer(tmp_path, 1) == store_of_layer(tmp_path / "1", 1) == tmp_path / "1"
    assert store_of_layer(tmp_path, 2) == tmp_path
    assert len(runs) == 4 and all(len(read) == 4 for read in runs)


def test_a_store_that_is_behind_catches_up_alone(model, source, written, make_blocks, tmp_path, monkeypatch):
    below = LiveActivations(model, make_blocks(10), 0)
    write_store(tmp_path / "alone", below, shard_bytes=SHARD)
    index = read_json(written.path / "index.json")
    write_json(written.path / "index.json", index | {"shards": index["shards"][:2]})
    calls = []

    def note(sources, chosen):
        calls.append(([source.layer for source in sources], chosen.tolist()))
        return batches(sources, chosen)

    monkeypatch.setattr(store_module, "batches", note)
    # shards of what is there keep their size
    write_stores({written.path: source, tmp_path / "below": below}, shard_bytes=2 * SHARD)
    assert calls[0] == ([0], [0, 1, 2, 3, 4, 5])
    assert [([1], [6, 7, 8]) in calls, ([1], [9]) in calls] == [True, True]
    assert _equal(ActivationStore(written.path).batch(range(10)), source.batch(range(10)))
    assert _equal(ActivationStore(tmp_path / "below").batch(range(10)), below.batch(range(10)))


def test_unknown_formats_are_refused(source, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        write_store(tmp_path / "store", source, dtype="floa16")
