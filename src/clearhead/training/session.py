"""What every training begins and ends with: the device it was asked for, a directory of its own, the memory it took."""

import resource
import sys
from pathlib import Path

from accelerate import Accelerator

from clearhead import configfile
from clearhead.config import Verb
from clearhead.errors import ClearheadError
from clearhead.model.loading import choose_device
from clearhead.training.checkpoint import list_checkpoints


def open_accelerator(device: str, *, bf16: bool = False) -> Accelerator:
    """The view that accelerate has of devices, processes and precision, for the device that was asked for.

    Raises `ClearheadError` when accelerate would compute elsewhere, and when this process trained before with other
    settings, which accelerate keeps for the life of a process.
    """
    asked = choose_device(device)
    try:
        accelerator = Accelerator(cpu=asked.type == "cpu", mixed_precision="bf16" if bf16 else "no")
    except ValueError as error:
        raise ClearheadError(
            f"this process has already trained with another device or precision ({error}); start a new one"
        ) from error
    if device == "auto":
        return accelerator
    given = accelerator.device
    if asked.type != given.type or asked.index not in (None, given.index):
        raise ClearheadError(
            f"--device {device} was asked for and training would run on {given}; choose the device with "
            f"CUDA_VISIBLE_DEVICES and leave out --device, or start a new process"
        )
    return accelerator


def refuse_other_run(path: Path, config: Verb, *, resume: bool, immaterial: tuple[str, ...]) -> None:
    """Raise `ClearheadError` if `path` holds a run of another configuration, or checkpoints when not resuming.

    Fields named in `immaterial` do not change what is trained and may differ.
    """
    if not resume and list_checkpoints(path):
        raise ClearheadError(
            f"{path} already holds a run; choose another --out, or leave out --no-resume to continue it"
        )
    configfile.refuse_other_run(path, config, immaterial)


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (device memory not included)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
