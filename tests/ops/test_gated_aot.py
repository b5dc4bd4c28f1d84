"""The GPU kernels of gated attention compile for Hopper, keep their values in registers and use its tensor cores."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

REPORT = """
import json
from clearhead.bench.aot import compile_kernels
print(json.dumps([one._asdict() for width in (64, 128) for one in compile_kernels(width)]))
"""


def test_no_kernel_spills_and_all_use_the_tensor_cores():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = ["forward", "query_gradient", "key_gradient"]
    assert [(one["width"], one["kernel"]) for one in report] == [(width, name) for width in (64, 128) for name in names]
    for one in report:
        assert one["spilled"] == 0 and one["products"] > 0, one
        assert one["shared"] <= 227 * 1024, one
