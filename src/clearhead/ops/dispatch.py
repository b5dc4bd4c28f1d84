"""Which backend runs an operation: the only place where that is decided.

    "c"      kernels in plain C for float32 on the CPU, compiled once into the user's cache
    "torch"  everything else: other dtypes, other devices, machines without a C compiler

and for gated attention also

    "compile"  the same tiles with their elementwise work compiled by torch, on the CPU, where there are no C kernels
    "triton"   kernels for CUDA devices

The environment variable CLEARHEAD_BACKEND forces one. Unset, "c" is taken where it can be built and agrees with the
float64 references; where not, the reason is printed once and the next one runs. Forced to "c", that reason is an error.
Tensors that the forced backend does not cover run in torch, and so do operations that it does not have.
"""

import functools
import importlib.util
import os
import sys
from typing import Literal, get_args

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops.c.build import BuildError
from clearhead.ops.c.kernels import Kernels
from clearhead.ops.gated_tiles import Engine, TorchTiles, differentiate, weigh

Backend = Literal["torch", "c"]
GatedBackend = Literal["torch", "c", "compile", "triton"]
VARIABLE = "CLEARHEAD_BACKEND"


def chosen(*tensors: Tensor) -> Backend:
    """The backend that runs an operation on these tensors."""
    return "torch" if kernels(*tensors) is None else "c"


def kernels(*tensors: Tensor) -> Kernels | None:
    """The C kernels where they run for these tensors, None where torch does.

    Raises `ClearheadError` when CLEARHEAD_BACKEND=c and the kernels cannot be had, `UnknownNameError` for a value of
    CLEARHEAD_BACKEND that is no backend.
    """
    forced = _forced()
    if forced not in ("", "c") or not all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors):
        return None
    loaded = _load()
    if isinstance(loaded, Kernels):
        return loaded
    if forced == "c":
        raise ClearheadError(f"{VARIABLE}=c, but {loaded}. Unset it, or set it to torch, to run in plain torch.")
    return None


def gated_backend(*tensors: Tensor) -> GatedBackend:
    """The name of the backend that runs gated attention on these tensors.

    Half precisions are computed in float32, so that "c" covers them too. Raises like `kernels`.
    """
    forced = _forced()
    if all(x.device.type == "cuda" for x in tensors) and forced in ("", "triton") and _has_triton():
        return "triton"
    if not all(x.device.type == "cpu" for x in tensors):
        return "torch"
    widths = {torch.promote_types(x.dtype, torch.float32) for x in tensors}
    if widths <= {torch.float32} and kernels() is not None:
        return "c"
    if forced == "compile" or (forced == "" and isinstance(_load(), str) and widths <= {torch.float32}):
        return "compile" if _compiled() is not None else "torch"
    return "torch"


def gated_engine(*tensors: Tensor) -> Engine:
    """Who does the elementwise work of gated attention in tiles; where `gated_backend` is "triton", plain torch."""
    backend = gated_backend(*tensors)
    loaded = kernels() if backend == "c" else _compiled() if backend == "compile" else None
    return loaded or TorchTiles(weigh, differentiate)


def _forced() -> str:
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", *get_args(GatedBackend)):
        raise UnknownNameError(f"backend in {VARIABLE}", forced, get_args(GatedBackend))
    return forced


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        sys.stderr.write("clearhead: triton is not installed; gated attention runs in plain torch on this device\n")
    return found


@functools.cache
def _compiled() -> TorchTiles | None:
    """The tiles compiled by torch, or None where that does not work here; forced, that is an error."""
    # seconds of imports
    import torch._dynamo
    from torch._dynamo.exc import TorchDynamoException

    try:
        torch.compile(torch.sin)(torch.zeros(2))
    except TorchDynamoException as error:
        if _forced() == "compile":
            raise ClearheadError(f"{VARIABLE}=compile, but torch cannot compile here: {error}") from error
        return None
    # one compilation per mode, estimator, denominator and kind of shape; torch's own limit is 8
    patched = torch._dynamo.config.patch(recompile_limit=64)
    return TorchTiles(*(patched(torch.compile(step, dynamic=True)) for step in (weigh, differentiate)))


@functools.cache
def _load() -> Kernels | str:
    """The checked kernels, or why there are none; the reason is printed at the first call only."""
    # the check runs the operations' references, whose modules import this one
    from clearhead.ops.c.check import load

    try:
        return load()
    except (BuildError, OSError) as error:
        if os.environ.get(VARIABLE) != "c":
            sys.stderr.write(f"clearhead: the fast CPU kernels are off ({error}); plain torch runs instead\n")
        return str(error)
