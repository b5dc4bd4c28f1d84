"""The only training loop: draws batches, steps the optimiser, logs, checkpoints, stops cleanly and resumes exactly.

What is trained and with which loss is a `Task`, on what is a `Source` (a Lorsa on activations, a language model on
tokens); the two agree on what a batch is, the task and its schedule on what is scheduled besides the rate. Batch
order and schedules are functions of (seed, step) alone and the loop draws no random numbers, so N steps equal N/2 steps
plus a resumed N/2, bitwise on CPU. accelerate places the module, wraps it for data parallelism and casts to bfloat16;
its `save_state` is not used because it writes pickle. Two processes see the two halves of the batch one would see.
"""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from clearhead.data.order import indices
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.runs import RunDirectory, progress
from clearhead.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from clearhead.training.optim import RateSchedule, adam, set_lr

LOG_EVERY = 20

Batch = TypeVar("Batch")
Served = TypeVar("Served", covariant=True)
Taken = TypeVar("Taken", contravariant=True)
Rate = TypeVar("Rate", bound=RateSchedule)
Followed = TypeVar("Followed", bound=RateSchedule, contravariant=True)


class Source(Protocol[Served]):
    """Anything that serves batches of numbered blocks: a tensor, or a tuple of tensors, with a row for each block."""

    context: int

    def __len__(self) -> int: ...
    def batch(self, block_indices: Any) -> Served:
        """The data of these blocks, in this order."""
        ...


class Task(Protocol[Taken, Followed]):
    """One thing to train. `loss` must be a mean over tokens, so that processes can be averaged."""

    module: nn.Module

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters with the factor on their learning rate."""
        ...

    def loss(
        self, forward: Callable[..., Any], batch: Taken, schedule: Followed, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one batch, and numbers to log."""
        ...

    def finish_step(self, accelerator: Accelerator) -> None:
        """Whatever follows the optimiser's step."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides weights and moments."""
        ...

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        ...


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of one step."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the loop itself needs to know."""

    batch_blocks: int
    seed: int
    grad_clip: float
    checkpoint_every: int
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0


def fit(
    task: Task[Batch, Rate],
    source: Source[Batch],
    schedule: Rate,
    settings: LoopSettings,
    run: RunDirectory,
    accelerator: Accelerator,
    tracker: Tracker | None = None,
    observe: Callable[[int], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Train `task` to the end of `schedule`, resuming from the newest checkpoint in `run` if there is one.

    `observe(n)` is called on every process after every step, with the number of steps done and before they are saved;
    what it returns, if anything, is logged. It must leave weights and random state as they are.

    Returns the seconds and tokens per second of the whole run, over all its processes' lives, and the last logged
    metrics. Raises `NonFiniteError` when the loss or a weight stops being a number, and `KeyboardInterrupt` after
    Ctrl-C, with a checkpoint saved.
    """
    optimizer = adam(task.groups(), schedule.peak_lr, settings.betas, settings.weight_decay)
    start, last, spent = _resume(run, task, optimizer, accelerator)
    forward, optimizer = accelerator.prepare(task.module, optimizer)
    rank, world = accelerator.process_index, accelerator.num_processes
    tokens_per_step = settings.batch_blocks * source.context
    begun = time.monotonic() - spent

    def save(step: int) -> None:
        nonlocal spent
        _refuse_non_finite_weights(task.module, step, run)
        spent = time.monotonic() - begun
        if accelerator.is_main_process:
            extra = {"seed": settings.seed, "metrics": last, "seconds": spent}
            save_checkpoint(run.path, step, task.module, optimizer, task.state(), extra)
        accelerator.wait_for_everyone()

    total = schedule.steps * tokens_per_step
    with _stop_on_signal() as stopped, progress("train", total, done=start * tokens_per_step) as advance:
        for step in range(start, schedule.steps):
            chosen = indices(settings.seed, step, settings.batch_blocks, len(source), rank=rank, world=world)
            batch: Any = send_to_device(source.batch(chosen), accelerator.device)
            set_lr(optimizer, schedule.peak_lr * schedule.lr_factor(step))
            loss, metrics = task.loss(forward, batch, schedule, step)
            accelerator.backward(loss)
            if settings.grad_clip:
                norm = accelerator.clip_grad_norm_(task.module.parameters(), settings.grad_clip)
                metrics["grad_norm"] = torch.as_tensor(norm)
            if not math.isfinite(float(loss.detach())):
                raise NonFiniteError(
                    f"the training loss is {float(loss.detach())} at step {step}; what the run in {run.path} had saved "
                    f"before is unchanged. Lower --lr, or look for damaged activations"
                )
            optimizer.step()
            optimizer.zero_grad()
            task.finish_step(accelerator)
            advance(tokens_per_step)
            done = step + 1
            seen = observe(done) if observe is not None else {}
            if seen or done % LOG_EVERY == 0 or done == schedule.steps:
                last = {name: float(value) for name, value in metrics.items()}
                last |= {"loss": float(loss.detach()), "lr": schedule.peak_lr * schedule.lr_factor(step), **seen}
                rate = done * tokens_per_step / (time.monotonic() - begun)
                if accelerator.is_main_process:
                    run.log(step=done, tokens=done * tokens_per_step, **last, tokens_per_second=round(rate, 1))
                    if tracker is not None:
                        tracker.log(last, done)
            stop = _any_process(stopped(), accelerator)
            if stop or done % settings.checkpoint_every == 0 or done == schedule.steps:
                save(done)
            if stop and done < schedule.steps:
                raise KeyboardInterrupt(f"saved after step {done} of {schedule.steps} in {run.path}")
    return {"tokens_per_second": total / spent, "train_seconds": spent, **last}


def _resume(
    run: RunDirectory, task: Task[Any, Any], optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[int, dict[str, float], float]:
    """Restore the newest checkpoint; returns the steps already done, their last metrics and the seconds they took."""
    found = list_checkpoints(run.path)
    state: dict[str, Any] = {"step": 0, "metrics": {}, "seconds": 0.0}
    if found:
        state, tensors = load_checkpoint(found[-1], task.module, optimizer)
        task.load_state(tensors)
    if accelerator.is_main_process:
        run.truncate_metrics(int(state["step"]))
    return int(state["step"]), dict(state["metrics"]), float(state["seconds"])


def _any_process(flag: bool, accelerator: Accelerator) -> bool:
    """Whether the flag is up anywhere: processes that stopped a step apart would wait for each other for ever."""
    if accelerator.num_processes == 1:
        return flag
    count = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), reduction="sum")
    return float(torch.as_tensor(count)) > 0


def _refuse_non_finite_weights(module: nn.Module, step: int, run: RunDirectory) -> None:
    """Raise `NonFiniteError` before damaged weights replace the last good checkpoint."""
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise NonFiniteError(
                f"{name} holds NaN or infinity after step {step}, so it was not saved; the run in {run.path} still "
                f"holds its checkpoint before that. Lower --lr, or look for damaged activations"
            )


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question asked between steps, so no step is torn; a second Ctrl-C is immediate."""
    hit = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal hit
        if hit:
            raise KeyboardInterrupt
        hit = True

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, where no handler can be set and none is needed
        yield lambda: False
        return
    try:
        yield lambda: hit
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_source(source: Source[Any], batch_blocks: int, world: int) -> None:
    """Refuse a batch that cannot be drawn or shared; raises `ClearheadError`."""
    if batch_blocks > len(source):
        raise ClearheadError(
            f"a batch of {batch_blocks} blocks was asked for and there are {len(source)}; lower --batch-tokens"
        )
    if batch_blocks % world:
        raise ClearheadError(
            f"a batch of {batch_blocks} blocks cannot be shared by {world} processes; choose --batch-tokens so that "
            f"the blocks per batch are a multiple of {world}"
        )
