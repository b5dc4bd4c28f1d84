"""A language model on this machine as explainer and as judge, small ones included.

A judge need not write: it compares the log-probabilities of the possible answers. With p(a | text) that of answer a
after a prompt that ends in "Answer:", and p(a | N/A) the same with N/A for every text,

    preference(a) = log p(a | text) - log p(a | N/A)

so what the model says whatever it is shown cancels. Detection and fuzzing ask about one text at a time and compare Yes
with No; the intruder is the letter of largest preference. An explanation is written greedily, to the end of its first
line. What was computed once is kept in the file of answers. A prompt that is longer than the model reads has no answer.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

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

    def log_probabilities(self, prompt: str, options: Sequence[str]) -> list[float] | None:
        """Of each option, log p after `prompt`; None in a dry run and for one too long."""
        answer = self._answer({"prompt": prompt, "options": list(options)}, prompt, 0)
        return None if answer is None else json.loads(answer.text)

    def continuation(self, prompt: str) -> str | None:
        """The first line that the model greedily writes after `prompt`; None in a dry run and for one too long."""
        answer = self._answer({"prompt": prompt, "tokens": WRITTEN_TOKENS}, prompt, WRITTEN_TOKENS)
        return None if answer is None else answer.text

    def _answer(self, request: dict[str, Any], prompt: str, written: int) -> Answer | None:
        key = key_of({"local": self.name, **request})
        held = self.answers.get(key)
        if held is not None:
            self.spending.count_cached()
            return held
        size = len(prompt.encode())
        expected = size / self.answers.bytes_per_token
        with self.spending.request(expected, written) as settle, self._lock:
            if not self.sending:
                settle(expected, written)
                return None
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
            text = self._write(tokens) if written else json.dumps(self._compare(tokens, request["options"]))
            settle(tokens.shape[1], written)
            answer = Answer(text, tokens.shape[1], written)
            self.answers.put(key, answer, size)
        return answer

    @torch.no_grad()
    def _compare(self, tokens: Tensor, options: Sequence[str]) -> list[float]:
        first = self._log_softmax(tokens, 1)[0]
        found = []
        for option in options:
            ids = self.model.tokenize(option, special_tokens=False)
            if ids.shape[1] == 1:
                found.append(float(first[ids[0, 0]]))
                continue
            rows = self._log_softmax(torch.cat([tokens, ids[:, :-1]], 1), ids.shape[1])
            found.append(float(rows.gather(1, ids[0, :, None]).sum()))
        return found

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
        said = " ".join(explanation.text.split())
        nothing = self._answers(question, said, NOTHING)
        asked = [
            self._answers(
                question, said, plain(case.text) if question.scorer == "detection" else marked(case.text, case.at)
            )
            for case in question.cases
        ]
        if nothing is None:
            return None
        found = [answers for answers in asked if answers is not None]
        verdicts = tuple(yes - nothing[0] > no - nothing[1] for yes, no in found)
        return verdicts if len(verdicts) == len(asked) else None

    def _answers(self, question: Question, said: str, text: str) -> list[float] | None:
        """Log-probabilities of Yes and No."""
        prompt = f"About a unit of a language model: {said}\nText: {text}\n{_ASK[question.scorer]} Answer:"
        return self.local.log_probabilities(prompt, (" Yes", " No"))

    def _intruder(self, question: Question) -> tuple[bool, ...] | None:
        letters = LETTERS[: len(question.cases)]
        head = "In four of the five texts the token marked «» is of the same kind. One text does not belong.\n"
        asked = []
        for texts in ([marked(case.text, case.at) for case in question.cases], [NOTHING] * len(letters)):
            lines = "\n".join(f"{letter}: {text}" for letter, text in zip(letters, texts, strict=True))
            prompt = f"{head}{lines}\nWhich text does not belong? Answer:"
            asked.append(self.local.log_probabilities(prompt, [f" {letter}" for letter in letters]))
        shown, nothing = asked
        if shown is None or nothing is None:
            return None
        preference = [a - b for a, b in zip(shown, nothing, strict=True)]
        chosen = preference.index(max(preference))
        return tuple(place != chosen for place in range(len(letters)))
