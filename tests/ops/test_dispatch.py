import shutil
import subprocess
import sys

import pytest
import torch

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops import dispatch
from clearhead.ops.c import build, check
from clearhead.ops.c.kernels import Kernels
from clearhead.ops.topk import topk

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("gcc", "clang", "cc")), reason="no C compiler is installed"
)


@pytest.fixture
def unloaded(monkeypatch):
    """No kernels yet in this process; whatever the cache holds."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    for cached in (dispatch._load, check.load):
        cached.cache_clear()
    yield
    for cached in (dispatch._load, check.load):
        cached.cache_clear()


@pytest.fixture
def fresh(unloaded, monkeypatch, tmp_path):
    """Nor in the cache, which is an empty folder."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    return tmp_path


def test_environment_decides(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert dispatch.chosen(torch.zeros(1)) == "torch"
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(UnknownNameError, match="CLEARHEAD_BACKEND"):
        dispatch.chosen()


@needs_compiler
def test_what_c_does_not_cover_runs_in_torch(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "c")
    assert dispatch.chosen(torch.zeros(1)) == "c"
    for other in (
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.bfloat16),
        torch.zeros(1, device="meta"),
    ):
        assert dispatch.chosen(torch.zeros(1), other) == "torch"


@needs_compiler
def test_built_once_found_again_and_checked_when_damaged(fresh):
    assert dispatch.chosen() == "c"
    (library,) = fresh.rglob("*.so")
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    written = library.stat().st_mtime_ns
    dispatch._load.cache_clear()
    check.load.cache_clear()
    assert dispatch.chosen() == "c"
    assert library.stat().st_mtime_ns == written
    # this process keeps the file mapped, so a new file and a new process must meet the damage
    library.unlink()
    library.write_bytes(b"\x7fELF")
    program = "from clearhead.ops import dispatch; print(dispatch.chosen())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch" and "do not load" in done.stderr


def test_without_compiler_torch_runs_and_says_so_once(fresh, monkeypatch, capfd):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert dispatch.chosen() == "torch"
    values, _ = topk(torch.tensor([[1.0, 3.0, 2.0]]), 1)
    assert values.item() == 3
    said = capfd.readouterr().err
    assert said.count("fast CPU kernels are off") == 1 and "no C compiler" in said
    monkeypatch.setenv(dispatch.VARIABLE, "c")
    with pytest.raises(ClearheadError, match="no C compiler"):
        dispatch.chosen()


@needs_compiler
def test_broken_compiler_is_reported(fresh, monkeypatch, capfd):
    monkeypatch.setattr(build, "OPTIONS", ("-fno-such-option",))
    assert dispatch.chosen() == "torch"
    assert "no-such-option" in capfd.readouterr().err
    assert not list(fresh.rglob("*.so")) and not list(fresh.rglob("*.part"))


@needs_compiler
def test_wrong_kernel_is_refused(unloaded, monkeypatch, capfd):
    right = Kernels.decode
    monkeypatch.setattr(Kernels, "decode", lambda *given: right(*given) * 1.001)
    assert dispatch.chosen() == "torch"
    assert "kernel decode differs from its reference" in capfd.readouterr().err


@needs_compiler
def test_nan_from_a_kernel_is_refused(unloaded, monkeypatch, capfd):
    monkeypatch.setattr(Kernels, "attend", lambda self, q, k, v, **geometry: torch.full_like(v, torch.nan))
    assert dispatch.chosen() == "torch"
    assert "attend 0 differs" in capfd.readouterr().err


@needs_compiler
def test_instruction_sets_without_wide_vectors_are_right(tmp_path):
    """The plainest x86-64 and AVX2 give the same results; on other processors the native build is all there is."""
    compiler = build._compiler()
    for march in ("x86-64", "x86-64-v3"):
        library = tmp_path / f"{march}.so"
        options = [x for x in build.OPTIONS if x not in ("-march=native", "-O3")] + ["-O1"]
        sources = [str(build.Path(build.__file__).parent / name) for name in build.SOURCES]
        done = subprocess.run(
            [compiler, *options, f"-march={march}", "-fopenmp", "-c", *sources], cwd=tmp_path, capture_output=True
        )
        if done.returncode:
            pytest.skip(f"the compiler does not know {march}")
        objects = [str(path) for path in sorted(tmp_path.glob("*.o"))]
        subprocess.run([compiler, "-shared", *objects, "-o", str(library)], check=True)
        for name, error in check.differences(Kernels(build.ctypes.CDLL(str(library)))).items():
            assert error < check.TOLERANCE, (march, name)
