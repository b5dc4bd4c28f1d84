"""`clearhead pretrain`: a small causal language model from scratch, with models kept along the way.

The loss is the mean next-token loss (nats) over sequences of two kinds, shuffled into one order:

    text       blocks of tokens, documents packed one after another
    repeats    random tokens repeated (data/repeats.py), `repeat_share` of all sequences

AdamW, gradient norm at most 1, learning rate up over the first 2 % of the steps and down over the last half. The models
are transformers' own GPT-2 and Llama without dropout, on their sdpa attention; they are saved as Hugging Face folders:
`model/` at the end, `snapshots/step-…/` where asked for. `checkpoints/` belongs to the loop, for resuming.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from clearhead.config import Pretrain
from clearhead.data.repeats import alphabet_of
from clearhead.data.text import TokenBlocks, token_blocks
from clearhead.data.tokenizer import train_tokenizer
from clearhead.errors import ClearheadError
from clearhead.hub import offline
from clearhead.model.loading import BUNDLED
from clearhead.runs import RunDirectory
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.language_model import LanguageModelling, TextAndRepeats, Watch, save_model
from clearhead.training.loop import LoopSettings, fit
from clearhead.training.optim import RateSchedule
from clearhead.training.session import open_accelerator, peak_memory, refuse_other_run

WARMUP_SHARE = 0.02
DECAY_SHARE = 0.5
WEIGHT_DECAY = 0.01
GRAD_CLIP = 1.0
BETAS = (0.9, 0.98)
HELD_OUT_BLOCKS = 64
SPREAD = 8  # the held-out blocks are taken from a text this many times as long, as neighbours are of one document
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IMMATERIAL = ("out", "resume", "device")


def pretrain(config: Pretrain) -> dict[str, Any]:
    """Train (or finish training) one model; returns the summary that the run directory also holds.

    Raises `ClearheadError` when the directory holds another configuration, the text is too short for one batch or for
    its vocabulary, or the tokenizer cannot be loaded; whatever was computed stays in the run directory.
    """
    accelerator = open_accelerator(config.device)
    config = config.resolved()
    run = RunDirectory(config.directory())
    main = accelerator.is_main_process
    with run if main else contextlib.nullcontext():
        refuse_other_run(run.path, config, resume=config.resume, immaterial=IMMATERIAL)
        if main:
            run.write_config(config.to_dict())
        tokenizer = open_tokenizer(config)
        source, blocks = open_text(config, tokenizer)
        model = build_model(config, tokenizer).to(accelerator.device).train()
        watch = Watch(
            model,
            tokenizer,
            run.path,
            held_out=open_held_out(config, tokenizer),
            alphabet=source.alphabet,
            keep=config.checkpoint_steps(),
            steps=config.steps(),
            save=main,
        )
        if main and not list_checkpoints(run.path):
            run.truncate_metrics(-1)
            run.log(step=0, tokens=0, **watch(0))
        result = fit(
            LanguageModelling(model), source, schedule(config), settings(config), run, accelerator, observe=watch
        )
        summary = {
            "architecture": config.architecture,
            "layers": config.layers,
            "width": config.width,
            "heads": config.heads,
            "vocabulary": model.config.vocab_size,
            "context": config.context,
            "parameters": model.num_parameters(),
            "text": blocks.source,
            "text_sha256": blocks.sha256,
            "text_tokens": blocks.tokens.numel(),
            "tokens": config.steps() * config.batch_tokens,
            "steps": config.steps(),
            "seed": config.seed,
            "snapshots": config.checkpoint_steps(),
            **{key: result[key] for key in ("loss", "held_out_ce", "repeat_ce_first", "repeat_ce_second")},
            **{key: result[key] for key in ("tokens_per_second", "train_seconds")},
            "peak_memory_bytes": peak_memory(),
        }
        if main:
            cast(nn.Module, model).to(DTYPES[config.store_dtype])
            save_model(model, tokenizer, run.path / "model")
            run.write_summary(summary)
        return summary


def time_steps(config: Pretrain, vocabulary: int, steps: int, folder: Path) -> float:
    """Tokens per second over a few steps on random sequences, from random weights; writes under `folder`."""
    accelerator = open_accelerator(config.device)
    short = dataclasses.replace(config, tokens=steps * config.batch_tokens, checkpoints="0")
    total = steps * config.batch_tokens // config.context
    alphabet = torch.arange(vocabulary)
    source = TextAndRepeats(alphabet[:0, None], config.context, total, total, config.seed, alphabet)
    task = LanguageModelling(model_of_size(config, vocabulary).to(accelerator.device).train())
    with RunDirectory(folder) as run:
        return fit(task, source, schedule(short), settings(short), run, accelerator)["tokens_per_second"]


def schedule(config: Pretrain) -> RateSchedule:
    """The learning rate a configuration means, in steps."""
    steps = config.steps()
    return RateSchedule(
        steps=steps, peak_lr=config.lr, warmup=round(WARMUP_SHARE * steps), decay=round(DECAY_SHARE * steps)
    )


def settings(config: Pretrain) -> LoopSettings:
    """What the loop needs to know; a checkpoint every 200 steps, or twenty in a short run."""
    return LoopSettings(
        batch_blocks=config.batch_tokens // config.context,
        seed=config.seed,
        grad_clip=GRAD_CLIP,
        checkpoint_every=min(200, max(1, config.steps() // 20)),
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
    )


def open_tokenizer(config: Pretrain) -> Tokenizer:
    """The tokenizer that was named, or one trained on the text; raises `ClearheadError` when there is none."""
    name = config.tokenizer
    if name is None:
        return train_tokenizer(config.text, config.resolved().vocabulary or 0)
    source = str(BUNDLED[name]()) if name in BUNDLED else name
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=offline(), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ClearheadError(
            f"--tokenizer {name}: no tokenizer could be loaded ({str(error).splitlines()[0]}); give a folder, a "
            f"Hugging Face id, or one of {', '.join(BUNDLED)}; or leave it out to train one"
        ) from error


def open_text(config: Pretrain, tokenizer: Tokenizer) -> tuple[TextAndRepeats, TokenBlocks]:
    """All sequences of a training, and the text among them; raises `ClearheadError` if it does not fill one batch."""
    per_batch = config.batch_tokens // config.context
    total = config.steps() * per_batch
    repeats = int(config.repeat_share * total)  # rounded down: some text is always left
    wanted = total - repeats
    blocks = token_blocks(
        tokenizer,
        config.text,
        split="train",
        n_tokens=wanted * config.context,
        context=config.context,
        at_most=True,
    )
    if len(blocks) < min(wanted, per_batch):
        raise ClearheadError(
            f"the train text of {config.text!r} has {len(blocks)} blocks of {config.context} tokens and a batch takes "
            f"{per_batch}; lower --batch-tokens or name a longer text"
        )
    return TextAndRepeats(blocks.tokens, config.context, total, repeats, config.seed, alphabet_of(tokenizer)), blocks


def open_held_out(config: Pretrain, tokenizer: Tokenizer) -> Int64[Tensor, "n t"]:
    """Blocks of the held-out split, spread over its documents."""
    wanted = HELD_OUT_BLOCKS * SPREAD * config.context
    blocks = token_blocks(
        tokenizer, config.text, split="held_out", n_tokens=wanted, context=config.context, at_most=True
    )
    return blocks.tokens[:: max(1, len(blocks) // HELD_OUT_BLOCKS)][:HELD_OUT_BLOCKS]


def build_model(config: Pretrain, tokenizer: Tokenizer) -> PreTrainedModel:
    """A model with transformers' own initialisation, a function of the seed; this process's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return model_of_size(config, len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)


def model_of_size(config: Pretrain, vocabulary: int, bos: Any = None, eos: Any = None) -> PreTrainedModel:
    """The model of a configuration on the current default device, its weights drawn from the current random state."""
    if config.architecture == "gpt2":
        shape = GPT2Config(
            vocab_size=vocabulary,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.mlp_width,
            # the function of gelu_new, GPT-2's own, computed in one pass: a step takes half the time
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=bos,
            eos_token_id=eos,
        )
        return GPT2LMHeadModel(shape)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=config.context,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            # three matrices of 8/3 d hold what GPT-2's two of 4 d do
            intermediate_size=config.mlp_width or -(-8 * config.width // 3),
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )
