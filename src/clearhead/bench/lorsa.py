"""`clearhead bench lorsa`: one training step of ours, of a dense implementation and of the reference package.

Each implementation runs in a process of its own (worker.py) on the same weights, input and target. First their
gradients are compared, then the processes take turns, one step at a time, so that a busy machine slows them alike.
Reported: medians of the CPU time of a step (all threads of the process) and of its wall time, their ratios, and the
peak of resident memory above what the imports hold. CPU time is the figure to trust on a machine that is not idle.
"""

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from clearhead.config import BenchLorsa
from clearhead.errors import ClearheadError
from clearhead.ops.dispatch import chosen
from clearhead.runs import environment, written_aside

WORKER = Path(__file__).with_name("worker.py")
AGREEMENT = 1e-3  # relative, in norm: near ties in the top-K may fall either way in a few tokens
REFERENCE = ("llamascopium==2.0.0b34",)
REFERENCE_NEEDS = (
    *("torch==2.13.0", "transformer-lens==2.17.0", "transformers==4.57.6", "datasets==4.6.1", "pyarrow<22", "pandas<3"),
    *("einops", "pymongo", "wandb", "openai", "jaxtyping", "safetensors", "pydantic", "pydantic-settings", "typer"),
    *("rich", "pyyaml", "tomlkit", "more-itertools", "json-repair", "cattrs"),
)


def bench_lorsa(config: BenchLorsa) -> dict[str, Any]:
    """Measure, print the table, write the report; returns the numbers by implementation.

    Raises `ClearheadError` when an implementation does not start, stops, or computes other gradients than ours.
    """
    pythons = {"ours": sys.executable, "dense": sys.executable}
    if config.reference_python is not None:
        if not config.reference_python.exists():
            raise ClearheadError(
                f"there is no interpreter {config.reference_python}; docs/howto/bench.md says how to make an "
                f"environment with the reference package"
            )
        pythons["reference"] = str(config.reference_python)
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.safetensors"
        _write_problem(config, problem)
        workers: dict[str, Worker] = {}
        try:
            for name, python in pythons.items():
                workers[name] = Worker(name, python, problem, config.threads)
            agreement = _compare_gradients(workers, Path(folder))
            results = _take_turns(workers, config.repeats)
        finally:
            for worker in workers.values():
                worker.close()
    report = _report(config, results, agreement)
    sys.stdout.write(report)
    path = config.out / f"{datetime.date.today().isoformat()}-lorsa.md"
    with written_aside(path) as aside:
        aside.write_text(report, encoding="utf-8")
    sys.stdout.write(f"\nwritten to {path}\n")
    return results | {"agreement": agreement}


def make_reference(folder: Path) -> Path:
    """Install the reference package into a virtual environment at `folder`; returns its interpreter.

    Its own pins admit versions under which it does not import, so it is installed without them, after versions that
    work. Raises `ClearheadError` with pip's last words when that fails.
    """
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "torch==2.13.0"], [*pip, *REFERENCE_NEEDS]]
    for step in [*steps, [*pip, "--no-deps", *REFERENCE], [str(python), "-W", "ignore", "-c", "import llamascopium"]]:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClearheadError(f"`{shlex.join(step)}` failed: {done.stderr.strip()[-600:]}")
    return python


class Worker:
    """One implementation in its own process."""

    def __init__(self, name: str, python: str, problem: Path, threads: int):
        self.name = name
        # idle threads must sleep, or their spinning counts as CPU time of the step that waits for them
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [python, "-P", "-W", "ignore", str(WORKER), name, str(problem)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.torch = self._answer()["torch"]

    def ask(self, command: str) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        _, said = self._process.communicate()
        raise ClearheadError(f"the {self.name} implementation stopped: {said.strip()[-600:]}")


def _write_problem(config: BenchLorsa, path: Path) -> None:
    """Weights of a freshly initialised layer with unit decoder rows, a random input and a target in its range."""
    draw = torch.Generator().manual_seed(0)
    d, n, g, dh = config.d_model, config.heads, config.groups, config.d_qk

    def normal(*shape: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * size

    problem = {"W_Q": normal(g, dh, d, size=d**-0.5), "W_K": normal(g, dh, d, size=d**-0.5)}
    problem |= {"W_V": normal(n, d, size=d**-0.5), "W_O": torch.nn.functional.normalize(normal(n, d), dim=1)}
    problem |= {"b_Q": normal(g, dh, size=0.1), "b_K": normal(g, dh, size=0.1)}
    problem |= {"b_V": normal(n, size=0.1), "b_D": normal(d, size=0.1)}
    problem |= {name: normal(config.batch, config.context, d) for name in ("x", "target")}
    sizes = {"d": d, "n": n, "g": g, "dh": dh, "k": config.k, "threads": config.threads}
    save_file(problem, path, metadata={key: str(value) for key, value in sizes.items()})


def _compare_gradients(workers: dict[str, Worker], folder: Path) -> dict[str, float]:
    """Largest relative difference of any parameter's gradient from ours, by implementation."""
    gradients = {}
    for name, worker in workers.items():
        path = folder / f"{name}.safetensors"
        worker.ask(f"gradients {path}")
        gradients[name] = load_file(path)
    worst = {}
    for name in workers:
        if name == "ours":
            continue
        errors = {}
        for key, mine in gradients["ours"].items():
            theirs = gradients[name][key].view_as(mine)
            errors[key] = float((mine - theirs).norm() / theirs.norm())
        worst[name] = max(errors.values())
        if not worst[name] < AGREEMENT:
            raise ClearheadError(f"the {name} implementation computes other gradients than ours: {errors}")
    return worst


def _take_turns(workers: dict[str, Worker], repeats: int) -> dict[str, dict[str, float]]:
    """Medians over `repeats` rounds after one round to warm up, and the peak memory of each process."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for number in range(repeats + 1):
        for name, worker in workers.items():
            taken = worker.ask("step")
            if number:
                rounds[name].append(taken)
    results = {}
    for name, worker in workers.items():
        results[name] = {key: statistics.median(taken[key] for taken in rounds[name]) for key in ("cpu", "wall")}
        results[name] |= {f"min_{key}": min(taken[key] for taken in rounds[name]) for key in ("cpu", "wall")}
        results[name] |= {"peak": worker.ask("end")["peak"]}
    return results


def _report(config: BenchLorsa, results: dict[str, dict[str, float]], agreement: dict[str, float]) -> str:
    env, named = environment(), {"ours": "clearhead", "dense": "dense torch", "reference": REFERENCE[0]}
    tokens = config.batch * config.context
    lines = [
        "# Lorsa: one training step (forward, backward, Adam)",
        "",
        f"d = {config.d_model}, {config.batch} x {config.context} tokens, {config.heads} heads in {config.groups} QK "
        f"groups of width {config.d_qk}, K = {config.k}, float32, {config.threads} threads. Medians of "
        f"{config.repeats} interleaved steps; 'ours / it' is clearhead's figure divided by that line's.",
        "",
        "| implementation | CPU ms | min | ours / it | wall ms | min | peak MB | ours / it | gradients differ by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ours = results["ours"]
    for name, taken in results.items():
        cells = [
            named[name],
            *(f"{1000 * taken[key]:.0f}" for key in ("cpu", "min_cpu")),
            f"{ours['cpu'] / taken['cpu']:.2f}",
            *(f"{1000 * taken[key]:.0f}" for key in ("wall", "min_wall")),
            f"{taken['peak'] / 1e6:.0f}",
            f"{ours['peak'] / taken['peak']:.2f}",
            f"{agreement[name]:.0e}" if name in agreement else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "CPU ms is the time of all threads of the process; peak MB is resident memory above what the imports hold, "
        "weights, Adam moments and gradients included. The dense and reference optimiser is torch's default Adam, "
        f"clearhead's is fused and keeps decoder rows at norm 1. Backend of clearhead: {chosen()}; tokens per step: "
        f"{tokens}.",
        "",
        f"Machine: {env['processor']}, {env['cores']} cores, {platform.system()}; torch {torch.__version__}; commit "
        f"{env['commit']}; {datetime.datetime.now().astimezone().isoformat(timespec='minutes')}.",
        "",
        f"Command: `clearhead {_command(config)}`",
        "",
    ]
    return "\n".join(lines)


def _command(config: BenchLorsa) -> str:
    """The verb with every option that differs from its default; paths of this machine are left out."""
    words = [config.verb]
    for name, value in config.to_dict().items():
        if name in BenchLorsa.__dataclass_fields__ and name != "out" and value != getattr(BenchLorsa(), name):
            shown = "PYTHON" if name == "reference_python" else str(value)
            words.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(words)
