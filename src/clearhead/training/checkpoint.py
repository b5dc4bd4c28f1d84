"""Checkpoints of our own: safetensors for tensors, JSON for counters; complete or absent.

A checkpoint is a folder `step-00000200` with `module.safetensors`, `optimizer.safetensors`, `task.safetensors` and
`state.json`. It is written under another name and renamed when all files are on the disk, so a killed process or a
full disk leaves the previous one intact. Parameters that are not trained are the module's own and are not saved.
(accelerate's `save_state` and torch's distributed checkpoint write pickle.)
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.dictionaries.dictionary import load_state, load_tensors, save_tensors
from clearhead.errors import CorruptFileError
from clearhead.runs import read_json, write_json

KEEP = 2
FILES = ("module.safetensors", "optimizer.safetensors", "task.safetensors", "state.json")


def save_checkpoint(
    run: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    task_state: dict[str, torch.Tensor],
    extra: dict[str, Any],
) -> Path:
    """Write the state after `step` steps under `run`/checkpoints and drop all but the newest two."""
    folder = run / "checkpoints"
    final = folder / f"step-{step:08d}"
    part = folder / f".{final.name}.{os.getpid()}.part"
    for left in folder.glob(".step-*.part"):  # by a process that was killed: the run directory is ours alone now
        shutil.rmtree(left)
    try:
        part.mkdir(parents=True, exist_ok=True)
        save_tensors(part / "module.safetensors", _without_ties(module))
        save_tensors(part / "optimizer.safetensors", _flatten(optimizer, module))
        save_tensors(part / "task.safetensors", task_state)
        write_json(part / "state.json", {"step": step, **extra})
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in list_checkpoints(run)[:-KEEP]:
        shutil.rmtree(old)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-" + "[0-9]" * 8))


def load_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Restore module and optimiser in place; returns the counters and the task's tensors.

    Raises `CorruptFileError` naming the file, and what to delete to continue from the checkpoint before.
    """
    try:
        missing = [name for name in FILES if not (folder / name).exists()]
        if missing:
            raise CorruptFileError(f"{folder} lacks {', '.join(missing)}")
        state = read_json(folder / "state.json")
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise CorruptFileError(f"{folder / 'state.json'} has no integer `step`")
        load_state(module, _with_ties(module, load_tensors(folder / "module.safetensors")), str(folder))
        _unflatten(optimizer, module, load_tensors(folder / "optimizer.safetensors"), str(folder))
        return state, load_tensors(folder / "task.safetensors")
    except CorruptFileError as error:
        raise CorruptFileError(
            f"{error}. Delete {folder} to continue from the checkpoint before it, or from the start"
        ) from error


def _second_names(module: nn.Module) -> dict[str, str]:
    """For every further name of a tied weight (an unembedding that is the embedding) the name it is saved under."""
    first: dict[nn.Parameter, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def _without_ties(module: nn.Module) -> dict[str, torch.Tensor]:
    second = _second_names(module)
    left_out = second.keys() | _frozen(module).keys()
    return {name: tensor for name, tensor in module.state_dict().items() if name not in left_out}


def _frozen(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def _with_ties(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = _frozen(module) | tensors
    return tensors | {name: tensors[saved] for name, saved in _second_names(module).items() if saved in tensors}


def _flatten(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, torch.Tensor]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        f"{names[parameter]}:{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def _unflatten(
    optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, torch.Tensor], where: str
) -> None:
    parameters = dict(module.named_parameters())
    for full, value in tensors.items():
        name, _, key = full.rpartition(":")
        if name not in parameters:
            raise CorruptFileError(f"the optimiser state in {where} names the parameter {name!r}, which does not exist")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device)
