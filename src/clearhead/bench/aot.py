"""What the compiler makes of the GPU kernels for Hopper (sm_90), found without a GPU.

    python -m clearhead.bench.aot [WIDTH ...] [--variants]

compiles the three kernels of gated attention for bfloat16 with the tiles that the library uses and prints of each:
registers per thread, bytes spilled to memory, shared memory, and how many instructions of the machine code are matrix
products of the tensor cores (HGMMA, HMMA), exponentials, roots and the like (MUFU), or anything. The counts are static:
how often an instruction runs is not in them. The tools that report registers and read machine code come with Triton.

The status is 1 if a kernel spills or does not use the tensor cores. Says nothing about speed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from clearhead.errors import ClearheadError
from clearhead.ops import gated_triton_kernels as kernels
from clearhead.ops.gated_triton import CODES, TILES, Tile, padded_width

WIDTHS = (64, 128)
VARIANTS = {
    "hard gates": {"MODE": CODES["hard"]},
    "open gates": {"MODE": CODES["open"]},
    "exact slope": {"EXACT": True},
    "documents": {"FIRST": True},
    "sink": {"SINK": True},
    "length price": {"SLOPED": True},
    "length price, sink, documents": {"SLOPED": True, "SINK": True, "FIRST": True},
    "check": {"CHECK": True},
}
"""What a call may ask for beside the plain case: sampled gates, straight-through, all keys in the denominator."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HALVES = ("Q", "K", "V", "dOut", "Out", "dQ", "dK", "dV")
INTEGERS = ("First", "Keys", "Opened", "Checksum", "End")
NUMBERS = {"T": "i32", "H": "i32", "GROUP": "i32", "scale": "fp32", "slope": "fp32"}


class Compiled(NamedTuple):
    """What one kernel became."""

    kernel: str
    width: int
    registers: int
    spilled: int
    """Bytes stored and loaded, in the program's text."""
    shared: int
    """Bytes of shared memory."""
    products: int
    """HGMMA instructions: products of a whole warp group, from shared memory."""
    small_products: int
    """HMMA instructions: products of one warp, from registers."""
    functions: int
    """MUFU instructions."""
    instructions: int


def compile_kernels(width: int, **settings: Any) -> list[Compiled]:
    """The three kernels for heads of this width; `settings` replaces constants of the plain case (VARIANTS).

    Raises `ClearheadError` for a width that the kernels do not serve.
    """
    if width > max(TILES):
        raise ClearheadError(f"heads of width {width}; expected at most {max(TILES)}")
    width = padded_width(width)
    tiles = TILES[min(w for w in TILES if w >= width)]
    return [compile_kernel(getattr(kernels, name), tile, width, settings) for name, tile in tiles._asdict().items()]


def compile_kernel(kernel: JITFunction, tile: Tile, width: int, settings: dict[str, Any]) -> Compiled:
    """One kernel for sm_90. Raises `ClearheadError` where the kernels are set up for the interpreter."""
    if not isinstance(kernel, JITFunction):
        raise ClearheadError("the kernels are set up for Triton's interpreter; unset TRITON_INTERPRET to compile them")
    constants = {
        "D": width, "DV": width, "ROWS": tile.rows, "COLUMNS": tile.columns, "MODE": CODES["sampled"], "EXACT": False,
        "SINK": False, "FIRST": False, "SLOPED": False, "CHECK": False,
    } | settings  # fmt: skip
    optional = {"Sink": "SINK", "First": "FIRST", "End": "FIRST", "Checksum": "CHECK"}
    constants |= {name: None for name, switch in optional.items() if not constants[switch]}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else _type(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in constants and (name == "T" or name not in NUMBERS)
        },
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps, "num_stages": tile.stages}
    )
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(made.asm["ptx"])
        cubin.write_bytes(made.asm["cubin"])
        said = _tool("ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", str(Path(folder) / "again.cubin"))
        machine = _tool("nvdisasm", "-c", str(cubin))
    return Compiled(
        kernel=kernel.__name__,
        width=width,
        registers=int(_found(r"Used (\d+) registers", said)[0]),
        spilled=sum(int(x) for x in _found(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)),
        shared=made.metadata.shared,
        products=len(re.findall(r"\bHGMMA\b", machine)),
        small_products=len(re.findall(r"\bHMMA\b", machine)),
        functions=len(re.findall(r"\bMUFU\b", machine)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", machine, re.MULTILINE)),
    )


def main() -> int:
    """Prints one line per kernel; the exit status says whether all are sound."""
    parser = argparse.ArgumentParser(prog="python -m clearhead.bench.aot")
    parser.add_argument("widths", nargs="*", type=int, default=WIDTHS, help="widths of the heads (64 128)")
    parser.add_argument("--variants", action="store_true", help="also with each option of the operation")
    given = parser.parse_args()
    sys.stdout.write(f"triton {triton.__version__}, sm_90, bfloat16\n" + _line(Compiled._fields) + "\n")
    sound = True
    for width in given.widths:
        for name, settings in ({"plain": {}} | (VARIANTS if given.variants else {})).items():
            for compiled in compile_kernels(width, **settings):
                sound &= compiled.spilled == 0 and compiled.products > 0
                sys.stdout.write(f"{_line(compiled)}  {name}\n")
                sys.stdout.flush()
    return 0 if sound else 1


def _line(cells: tuple[Any, ...]) -> str:
    widths = [max(len(name), 6) + 2 for name in Compiled._fields[1:]]
    return f"{cells[0]:15}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths, strict=True))


def _type(name: str) -> str:
    if name in NUMBERS:
        return NUMBERS[name]
    return "*bf16" if name in HALVES else "*i32" if name in INTEGERS else "*fp32"


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClearheadError(f"{name} of triton {triton.__version__} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def _found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise ClearheadError(f"ptxas of triton {triton.__version__} reported no {pattern!r}:\n{text}")
    return match.groups()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClearheadError as error:
        sys.exit(f"clearhead: {error}")
