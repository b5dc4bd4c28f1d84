"""Which backend runs an operation: the only place where that is decided.

    "c"      kernels in plain C for float32 on the CPU, compiled once into the user's cache
    "torch"  everything else: other dtypes, other devices, machines without a C compiler

The environment variable CLEARHEAD_BACKEND forces one. Unset, "c" is taken where it can be built and agrees with the
float64 references; where not, the reason is printed once and torch runs. Forced to "c", that reason is an error.
Tensors that "c" does not cover run in torch even when it is forced.
"""

import functools
import os
import sys
from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops.c.build import BuildError
from clearhead.ops.c.kernels import Kernels

Backend = Literal["torch", "c"]
VARIABLE = "CLEARHEAD_BACKEND"


def chosen(*tensors: Tensor) -> Backend:
    """The backend that runs an operation on these tensors."""
    return "torch" if kernels(*tensors) is None else "c"


def kernels(*tensors: Tensor) -> Kernels | None:
    """The C kernels where they run for these tensors, None where torch does.

    Raises `ClearheadError` when CLEARHEAD_BACKEND=c and the kernels cannot be had, `UnknownNameError` for a value of
    CLEARHEAD_BACKEND that is no backend.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", "torch", "c"):
        raise UnknownNameError(f"backend in {VARIABLE}", forced, ("torch", "c"))
    if forced == "torch" or not all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors):
        return None
    loaded = _load()
    if isinstance(loaded, Kernels):
        return loaded
    if forced == "c":
        raise ClearheadError(f"{VARIABLE}=c, but {loaded}. Unset it, or set it to torch, to run in plain torch.")
    return None


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
