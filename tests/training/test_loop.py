"""The loop: exact resume, also after a kill; two processes as one; Ctrl-C saves; other settings are refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clearhead.data.harvest import Activations, LiveActivations
from clearhead.data.store import write_store
from clearhead.data.text import token_blocks
from clearhead.dictionaries.dictionary import load_tensors
from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.runs import RunDirectory, read_json
from clearhead.training import train as train_module
from clearhead.training import train_dictionary
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.train import train_lorsa

WORKER = """
import json, sys
from pathlib import Path
import torch
from clearhead.configfile import from_dict
from clearhead.training.train import train_lorsa
torch.set_num_threads(1)
train_lorsa(from_dict(json.loads(Path(sys.argv[1]).read_text())))
"""


def weights_of(run: Path) -> bytes:
    return (run / "lorsa" / "model.safetensors").read_bytes()


def in_subprocess(config, tmp_path, *launcher: str) -> subprocess.Popen:
    script, settings = tmp_path / "worker.py", tmp_path / "config-of-worker.json"
    script.write_text(WORKER)
    settings.write_text(json.dumps(config.to_dict()))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), str(settings)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def stop_when(step: int, action):
    """A source of activations that calls `action` before it serves the batch of `step`."""

    class Stopping(train_dictionary.LiveActivations):
        served = 0

        def batch(self, block_indices) -> Activations:
            if len(block_indices) == 2:
                if Stopping.served == step:
                    action()
                Stopping.served += 1
            return super().batch(block_indices)

    return Stopping


def test_a_killed_run_resumed_equals_an_uninterrupted_one_bitwise(short, tmp_path):
    whole = dataclasses.replace(short, out=tmp_path / "whole")
    train_lorsa(whole)
    killed = dataclasses.replace(short, out=tmp_path / "killed", tokens=short.tokens)
    process = in_subprocess(killed, tmp_path)
    deadline = time.monotonic() + 120
    while not list_checkpoints(tmp_path / "killed"):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert int(list_checkpoints(tmp_path / "killed")[-1].name[5:]) < 12
    train_lorsa(killed)
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


def test_half_plus_resumed_half_equals_the_whole_bitwise(short, tmp_path, monkeypatch):
    whole = dataclasses.replace(short, out=tmp_path / "whole")
    train_lorsa(whole)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="saved after step 6 of 12"):
        patch.setattr(train_dictionary, "LiveActivations", stop_when(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
        train_lorsa(short)
    assert list_checkpoints(short.out)[-1].name == "step-00000006"
    assert not (short.out / "lorsa").exists()
    train_lorsa(short)
    assert weights_of(short.out) == weights_of(tmp_path / "whole")
    assert [json.loads(line)["step"] for line in (short.out / "metrics.jsonl").read_text().splitlines()] == [12]


def test_two_processes_equal_one(short, tiny, tmp_path):
    one = dataclasses.replace(short, out=tmp_path / "one", tokens=4 * 64, checkpoint_every=100)
    two = dataclasses.replace(one, out=tmp_path / "two")
    train_lorsa(one)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = in_subprocess(two, tmp_path, *launcher)
    output, _ = process.communicate(timeout=240)
    assert (tmp_path / "two" / "summary.json").exists(), output
    assert_same_updates(tiny, one, tmp_path / "one", tmp_path / "two")


def assert_same_updates(tiny, config, first: Path, second: Path) -> None:
    """Two runs moved every parameter the same way, up to rounding.

    Adam turns rounding into steps of full size where a gradient is near zero, so updates are compared as a whole.
    Without a rotation a key bias shifts all scores of a query alike, so its gradient is rounding alone.
    """
    source, blocks = train_module.open_source(tiny, config)
    lorsa = train_module.empty_lorsa(tiny, config)
    train_module.initialise_lorsa(lorsa, tiny, config, source, blocks)
    start = lorsa.state_dict()
    one, two = (load_tensors(list_checkpoints(run)[-1] / "module.safetensors") for run in (first, second))
    for name in one.keys() - {"b_K"}:
        update = (one[name] - start[name]).norm()
        assert float(update) > 0, name
        assert float((one[name] - two[name]).norm() / update) < 0.02, name


def test_a_finished_run_repeats_nothing(short):
    summary = train_lorsa(short)
    before = weights_of(short.out)
    again = train_lorsa(short)
    assert weights_of(short.out) == before
    peak = ("peak_memory_bytes",)
    assert {k: v for k, v in again.items() if k not in peak} == {k: v for k, v in summary.items() if k not in peak}
    assert summary["tokens"] == 768 and summary["final_batch_fvu"] > 0 and summary["tokens_per_second"] > 0


def test_other_settings_in_the_same_directory_are_refused(short):
    train_lorsa(short)
    with pytest.raises(ClearheadError, match="k: 8 -> 9"):
        train_lorsa(dataclasses.replace(short, k=9))
    with pytest.raises(ClearheadError, match="already holds a run"):
        train_lorsa(dataclasses.replace(short, resume=False))


def test_two_runs_in_one_directory_are_refused(short):
    with RunDirectory(short.out), pytest.raises(ClearheadError, match="another process is writing"):
        train_lorsa(short)


def test_a_truncated_checkpoint_is_named_and_the_one_before_loads(short):
    train_lorsa(short)
    whole = weights_of(short.out)
    newest = list_checkpoints(short.out)[-1]
    damaged = newest / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CorruptFileError, match=f"Delete {newest} to continue from the checkpoint before it"):
        train_lorsa(short)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    train_lorsa(short)
    assert weights_of(short.out) == whole


def test_a_full_disk_keeps_the_last_checkpoint(short, monkeypatch):
    from clearhead.training import checkpoint

    real, calls = checkpoint.save_tensors, []

    def full(path, tensors):
        calls.append(path)
        if len(calls) > 4:
            path.write_bytes(b"half a file")
            raise ClearheadError("no space left on the disk")
        real(path, tensors)

    with monkeypatch.context() as patch, pytest.raises(ClearheadError, match="no space left"):
        patch.setattr(checkpoint, "save_tensors", full)
        train_lorsa(short)
    assert [path.name for path in (short.out / "checkpoints").iterdir()] == ["step-00000004"]
    train_lorsa(short)
    assert read_json(short.out / "summary.json")["tokens"] == 768


def test_a_loss_that_is_no_number_stops_the_run(short, monkeypatch):
    class Broken(train_dictionary.LiveActivations):
        def batch(self, block_indices) -> Activations:
            batch = super().batch(block_indices)
            return batch._replace(y=batch.y * float("inf")) if len(block_indices) == 2 else batch

    monkeypatch.setattr(train_dictionary, "LiveActivations", Broken)
    with pytest.raises(NonFiniteError, match="at step 0.*Lower --lr"):
        train_lorsa(short)


def test_batches_larger_than_the_text_are_refused(short):
    with pytest.raises(ClearheadError, match="lower --batch-tokens"):
        train_lorsa(dataclasses.replace(short, tokens=64, batch_tokens=32 * 100_000))


def test_a_store_serves_any_number_of_tokens(short, tiny, tmp_path):
    live = dataclasses.replace(short, out=tmp_path / "live")
    train_lorsa(live)
    blocks = token_blocks(tiny, short.text, split="train", n_tokens=short.tokens, context=32)
    write_store(tmp_path / "store", LiveActivations(tiny, blocks, 1))
    stored = dataclasses.replace(short, store=tmp_path / "store", out=tmp_path / "stored")
    train_lorsa(stored)
    # the same batches, but the model ran on other numbers of blocks at once
    assert_same_updates(tiny, live, tmp_path / "live", tmp_path / "stored")
    longer = dataclasses.replace(stored, tokens=3 * short.tokens, out=tmp_path / "longer")
    assert train_lorsa(longer)["tokens"] == 3 * short.tokens
    with pytest.raises(ClearheadError, match="layer"):
        train_lorsa(dataclasses.replace(stored, layer=0, out=tmp_path / "other"))
