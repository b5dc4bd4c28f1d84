"""A language model on this machine as explainer and as judge, small ones included.

A judge need not write: it compares the log-probabilities of the possible answers. Detection and fuzzing ask about one
text at a time. A text counts as active when its

    preference = log p(Yes | text) - log p(No | text)

is above the mean over the texts of its question, about half of which are active: what the model says whatever it is
shown cancels, and with it how many it would call active. The intruder is the letter a of largest log p(a | texts) -
log p(a | N/A), with N/A for every text. An explanation is written greedily, to the end of its first line. What was
computed once is kept in the file of answers. A prompt that is longer than the model reads has no answer.

Prompts of one question are computed together: the tokens that all begin with once, their keys and values kept, then the
rest of each as a row of a batch, filled up behind, where causal attention does not look.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from clearhead.errors import ClearheadError
from clearhead.explain.answers import Answer, Answers, Spending, Stopped, key_of
from clearhead.explain.endpoint import IN_A_ROW
from clearhead.explain.evidence import Evidence
from clearhead.explain.language_model import read_explanation
from clearhead.explain.marks import marked, plain, with_pattern
from clearhead.explain.questions import Question
from clearhead.explain.template import Explanation
from clearhead.model.access import Model

EXAMPLES = 5
"""Examples shown to an explainer: the strongest."""
WRITTEN_TOKENS = 40
TOKENS_AT_ONCE = 4096
"""Tokens of a batch of prompts, filled up to equal length."""
NOTHING = "N/A"
LETTERS = "ABCDE"
_ASK = {"detection": "Is the unit active anywhere in this text?", "fuzzing": "Is the unit active on the marked token?"}


class LocalModel:
    """A model that is loaded when it is first needed.

    sending: without it nothing is computed and only the costs are counted, which is a dry run.
    """

    def __init__(
        self, name: str, load: Callable[[], Model], answers: Answers, spending: Spending, *, sending: bool = True
    ):
        self.name, self._load, self.answers, self.spending, self.sending = name, load, answers, spending, sending
        self._lock = threading.Lock()
        self._too_long = 0

    @cached_property
    def model(self) -> Model:
        """The model, loaded."""
        return self._load()

    def log_probabilities(self, prompts: Sequence[str], options: Sequence[str]) -> list[list[float] | None]:
        """By prompt, of each option, log p after it; None in a dry run and for a prompt too long."""
        keys = {prompt: key_of({"local": self.name, "prompt": prompt, "options": list(options)}) for prompt in prompts}
        found: dict[str, list[float] | None] = {}
        missing: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for prompt, key in keys.items():
                held = self.answers.get(key)
                if held is not None:
                    self.spending.count_cached()
                    found[prompt] = json.loads(held.text)
                    continue
                tokens = self._admit(prompt, 0, stack)
                found[prompt] = None
                if tokens is not None:
                    missing[prompt] = tokens
            if missing:
                with self._lock:
                    computed = self._compare(list(missing.values()), options)
                for (prompt, tokens), values in zip(missing.items(), computed, strict=True):
                    found[prompt] = values
                    answer = Answer(json.dumps(values), tokens.shape[1], 0)
                    self.answers.put(keys[prompt], answer, len(prompt.encode()))
        return [found[prompt] for prompt in prompts]

    def continuation(self, prompt: str) -> str | None:
        """The first line that the model greedily writes after `prompt`; None in a dry run and for one too long."""
        key = key_of({"local": self.name, "prompt": prompt, "tokens": WRITTEN_TOKENS})
        held = self.answers.get(key)
        if held is not None:
            self.spending.count_cached()
            return held.text
        with ExitStack() as stack:
            tokens = self._admit(prompt, WRITTEN_TOKENS, stack)
            if tokens is None:
                return None
            with self._lock:
                text = self._write(tokens)
            self.answers.put(key, Answer(text, tokens.shape[1], WRITTEN_TOKENS), len(prompt.encode()))
        return text

    def _admit(self, prompt: str, written: int, stack: ExitStack) -> Tensor | None:
        """The tokens of a prompt, counted as one request; None in a dry run and for one too long."""
        expected = len(prompt.encode()) / self.answers.bytes_per_token
        settle = stack.enter_context(self.spending.request(expected, written))
        if not self.sending:
            settle(expected, written)
            return None
        with self._lock:
            tokens = self.model.tokenize(prompt)
        room = self.model.n_ctx
        if room is not None and tokens.shape[1] + max(written, 1) > room:
            why = f"{self.name} reads {room} tokens and a prompt has {tokens.shape[1]}; name one that reads more"
            self.spending.count_failed(why)
            self._too_long += 1
            if self._too_long >= IN_A_ROW:
                raise Stopped(f"{IN_A_ROW} prompts in a row were too long: {why}")
            return None
        self._too_long = 0
        settle(tokens.shape[1], written)
        return tokens

    @torch.no_grad()
    def _compare(self, prompts: list[Tensor], options: Sequence[str]) -> list[list[float]]:
        """Log-probabilities of the options after each prompt [1, t]."""
        ids = [self.model.tokenize(option, special_tokens=False) for option in options]
        if all(option.shape[1] == 1 for option in ids):
            columns = torch.cat(ids, 1)[0]
            return self._next(prompts)[:, columns].tolist()
        found: list[list[float]] = [[] for _ in prompts]
        for tokens, values in zip(prompts, found, strict=True):
            for option in ids:
                rows = self._log_softmax(torch.cat([tokens, option[:, :-1]], 1), option.shape[1])
                values.append(float(rows.gather(1, option[0, :, None]).sum()))
        return found

    def _next(self, prompts: list[Tensor]) -> Float[Tensor, "n v"]:
        """Log-probabilities of the next token of each prompt."""
        width = max(tokens.shape[1] for tokens in prompts)
        shared = 0
        if len(prompts) > 1:
            shortest = min(tokens.shape[1] for tokens in prompts)
            same = torch.cat([tokens[:, : shortest - 1] for tokens in prompts])
            shared = int((same == same[:1]).all(0).long().cumprod(0).sum())
        found = []
        rows = max(1, TOKENS_AT_ONCE // (width - shared))
        for first in range(0, len(prompts), rows):
            part = prompts[first : first + rows]
            cache = None
            if shared:
                cache = DynamicCache(config=self.model.hf.config)
                self._forward(part[0][:, :shared], [shared], cache)
                cache.batch_repeat_interleave(len(part))
            lengths = [tokens.shape[1] - shared for tokens in part]
            batch = torch.zeros(len(part), max(lengths), dtype=torch.int64)
            for row, tokens in enumerate(part):
                batch[row, : lengths[row]] = tokens[0, shared:]
            found.append(self._forward(batch, lengths, cache))
        return torch.cat(found).double().log_softmax(-1)

    def _forward(self, tokens: Tensor, lengths: list[int], cache: DynamicCache | None) -> Float[Tensor, "n v"]:
        """Logits behind the last token of each row, rows being `lengths` long; keys and values go into the cache."""
        model = self.model
        unembedding = model.places.unembedding
        if unembedding is None:
            raise ClearheadError(f"{self.name} has no unembedding and cannot judge; name a language model")
        # transformers called it past_key_values until 5.24
        name = "cache" if "cache" in signature(model.hf.forward).parameters else "past_key_values"
        at = torch.tensor(lengths, device=model.device) - 1
        rows = torch.arange(len(lengths), device=model.device)
        handle = unembedding.register_forward_pre_hook(lambda _, given: (given[0][rows, at][:, None], *given[1:]))
        try:
            with model.evaluating():
                options = {name: cache, "use_cache": cache is not None}
                return cast(Any, model.hf)(tokens.to(model.device), **options).logits[:, 0]
        finally:
            handle.remove()

    def _log_softmax(self, tokens: Tensor, last: int) -> Float[Tensor, "last v"]:
        logits = self.model.run(tokens, positions=range(-last, 0))["logits"][0]
        return logits.double().log_softmax(-1)

    def _write(self, tokens: Tensor) -> str:
        """Greedy text, up to the end of its first line that is not empty."""
        hf = self.model.hf
        written = cast(Any, hf).generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=WRITTEN_TOKENS,
            do_sample=False,
            pad_token_id=hf.config.eos_token_id,
        )
        ids = [int(token) for token in written[0, tokens.shape[1] :] if int(token) != hf.config.eos_token_id]
        return "".join(self.model.token_strings(ids)).strip().split("\n")[0]


class LocalExplainer:
    """Explains with a model on this machine."""

    def __init__(self, local: LocalModel):
        self.local, self.name = local, local.name

    def explain(self, evidence: Evidence) -> Explanation | None:
        """What the model writes about the strongest examples, or None where it writes nothing."""
        ordered = sorted(evidence.written.active, key=lambda example: -abs(example.activation))
        lines = [f"Text: {with_pattern(example, evidence.largest)}" for example in ordered[:EXAMPLES]]
        head = "A unit of a language model is active on the tokens marked «» and reads those marked ‹›."
        written = self.local.continuation("\n".join([head, *lines, "In all these texts the unit is active on"]))
        text = None if written is None else read_explanation(f"Active on {written}")
        if written is not None and (not written or text is None):
            self.local.spending.count_failed(f"it wrote {str(written)[:60]!r}, which explains nothing")
            return None
        return None if text is None else Explanation(text)


class LocalJudge:
    """Judges by comparing log-probabilities."""

    def __init__(self, local: LocalModel):
        self.local, self.name = local, local.name

    def judge(self, question: Question, explanation: Explanation) -> tuple[bool, ...] | None:
        """The verdict on every text; None in a dry run."""
        if question.scorer == "intruder":
            return self._intruder(question)
        begin = (
            f"About a unit of a language model: {' '.join(explanation.text.split())}\n{_ASK[question.scorer]}\nText: "
        )
        unmarked = question.scorer == "detection"
        texts = [plain(case.text) if unmarked else marked(case.text, case.at) for case in question.cases]
        asked = self.local.log_probabilities([f"{begin}{text}\nAnswer:" for text in texts], (" Yes", " No"))
        preference = [answers[0] - answers[1] for answers in asked if answers is not None]
        if len(preference) < len(asked):
            return None
        usual = sum(preference) / len(preference)
        return tuple(one > usual for one in preference)

    def _intruder(self, question: Question) -> tuple[bool, ...] | None:
        letters = LETTERS[: len(question.cases)]
        head = "In four of the five texts the token marked «» is of the same kind. One text does not belong.\n"
        prompts = []
        for texts in ([marked(case.text, case.at) for case in question.cases], [NOTHING] * len(letters)):
            lines = "\n".join(f"{letter}: {text}" for letter, text in zip(letters, texts, strict=True))
            prompts.append(f"{head}{lines}\nWhich text does not belong? Answer:")
        shown, nothing = self.local.log_probabilities(prompts, [f" {letter}" for letter in letters])
        if shown is None or nothing is None:
            return None
        preference = [a - b for a, b in zip(shown, nothing, strict=True)]
        chosen = preference.index(max(preference))
        return tuple(place != chosen for place in range(len(letters)))
