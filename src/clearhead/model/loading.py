"""Models from disk or from the hub, with errors that say what to type instead.

Weights come from safetensors only (the other format runs code when read), and no repository's code is ever run. Where
the network is switched off (see hub.py), only local files are used.
"""

import json
import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file

from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.hub import offline
from clearhead.model import bundled
from clearhead.model.gates import CHILD, SETTINGS

DType = Literal["float32", "bfloat16", "float16", "float64", "auto"]
Device = str
"""A torch device (`cpu`, `cuda`, `cuda:1`, `mps`), or `auto`: the accelerator where there is one, else the CPU."""

BUNDLED = {"smollm2": bundled.smollm2, "clearhead-tiny": bundled.tiny}
"""Models that need no model hub."""


@dataclass(frozen=True)
class Loaded:
    """A model from disk and where it came from."""

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    note: str
    revision: str | None
    gates: dict[str, Tensor] | None = None
    """The tensors of a sparse model's edge gates (gates.py) by their names in the checkpoint."""


def load_model(name: str, *, dtype: DType, device: Device, revision: str | None, tokenizer: bool) -> Loaded:
    """Loads a causal language model on its default attention; see `Model.load`."""
    if dtype not in get_args(DType):
        raise UnknownNameError("dtype", dtype, get_args(DType))
    place = choose_device(device)
    source = str(BUNDLED[name]()) if name in BUNDLED else name
    options = {"revision": revision, "trust_remote_code": False, "local_files_only": offline()}
    try:
        with no_bar_for_weights(), _no_report_of_gates():
            found = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CorruptFileError(f"the files of {name!r} cannot be read: {error}") from error
    except RuntimeError as error:
        raise CorruptFileError(f"the weights of {name!r} do not fit its config: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        raise _explain(name, error) from error
    hf, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], found)
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise CorruptFileError(f"the files of {name!r} lack {len(missing)} of its weights ({missing[0]}, ...)")
    gates = None
    if SETTINGS in vars(hf.config):
        names = sorted(name for name in report["unexpected_keys"] if CHILD in name.split("."))
        gates = _read_tensors(source, names, options)
    try:
        loaded_tokenizer = AutoTokenizer.from_pretrained(source, **options) if tokenizer else None
    except (OSError, ValueError) as error:
        raise ClearheadError(
            f"{name!r} has no tokenizer that can be loaded ({_first_line(error)}); load it with tokenizer=False and"
            " pass token ids"
        ) from error
    commit = vars(hf.config).get("_commit_hash") or revision  # transformers sets it for repositories of the hub
    note = bundled.NOTES.get(name) or (f"{name} at revision {commit}" if commit else name)
    cast(nn.Module, hf).to(place)
    return Loaded(hf, loaded_tokenizer, note, commit, gates)


def _read_tensors(source: str, names: list[str], options: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a checkpoint, in one file or several, that transformers did not place."""
    options = {name: value for name, value in options.items() if name != "trust_remote_code"}
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **options)
    shards = json.loads(Path(index).read_text())["weight_map"] if index else dict.fromkeys(names, SAFE_WEIGHTS_NAME)
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = cached_file(source, shards[name], **options)
        assert path is not None
        with safe_open(path, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


@contextmanager
def _no_report_of_gates() -> Iterator[None]:
    """Without transformers' report that a checkpoint's gates found no place, which here they will."""
    logger = python_logging.getLogger("transformers.modeling_utils")

    def other(record: python_logging.LogRecord) -> bool:
        return CHILD not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


@contextmanager
def no_bar_for_weights() -> Iterator[None]:
    """Without transformers' progress bar, which flickers by on every load and save; the hub's, of downloads, stays.

    Where the environment decides about bars (HF_HUB_DISABLE_PROGRESS_BARS), it is left to it.
    """
    if HF_HUB_DISABLE_PROGRESS_BARS is not None or not logging.is_progress_bar_enabled():
        yield
        return
    hub_shows = not are_progress_bars_disabled()
    logging.disable_progress_bar()  # and the hub's with it
    if hub_shows:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if not hub_shows:
            disable_progress_bars()


def choose_device(device: Device) -> torch.device:
    """The torch device that `device` names."""
    if device == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ClearheadError(
            f"device {device!r} cannot be used here ({_first_line(error)}); use cpu or auto"
        ) from error
    return place


def _explain(name: str, error: Exception) -> ClearheadError:
    """Why no model could be loaded under this name."""
    if Path(name).is_dir():
        return ClearheadError(
            f"the folder {name!r} does not hold a causal language model that transformers can read:"
            f" {_first_line(error)}"
        )
    network = "The network is switched off (CLEARHEAD_OFFLINE or HF_HUB_OFFLINE is set), and" if offline() else "And"
    return UnknownNameError(
        "model",
        name,
        BUNDLED,
        f"{network} no local folder or Hugging Face repository of that name could be loaded: {_first_line(error)}",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
