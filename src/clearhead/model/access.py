"""The model under study: load it, read and edit its sites in one forward, leave it as it was found.

    model = Model.load("smollm2")
    run = model.run(model.tokenize("When Mary and John"), read=["attn_in.12", "pattern.12", "logits"])
    run = model.run(tokens, edit={"z.12": lambda z, run: z * keep}, read=["logits"], grad=True)

A forward takes one of two paths, the same in all its layers and rows. Path sdpa (HF's fused attention, its speed and
memory) when nothing of the softmax is read or edited; path eager (the family's own eager attention) when scores, sink
or pattern are, or on request. On either, the numbers are bit for bit what HF computes on that path. The forward ends
after the last site that is read or edited: layers above it are not run, and logits are not computed unless read.
It can also begin at a layer, from a residual stream that an earlier run read there, and compute the logits of some
positions only: what many edits of one prompt share is then computed once.

Not here: generation and caches (transformers does both), weights (weights.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from inspect import signature
from typing import Self

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clearhead.errors import ClearheadError
from clearhead.model import geometry, weights
from clearhead.model.attention import NAMES, attention_implementation, tap_forward
from clearhead.model.families import find_family
from clearhead.model.gates import Gates, find_gates, restore_gates
from clearhead.model.loading import Device, DType, load_model
from clearhead.model.places import Places
from clearhead.model.run import Edit, Finished, Path, Recorder, Run, recording
from clearhead.model.self_test import check_model
from clearhead.model.sites import FUNCTION_SITES, SOFTMAX_SITES, Site, expand
from clearhead.model.tokens import pad_texts, tokenize_texts, vocabulary_strings


class Model:
    """A causal language model whose sites can be read and edited.

    hf is the transformers model itself, tokenizer its tokenizer or None; name, note and revision say where it came
    from; gates are the tensors of a sparse model's edge gates (gates.py). Sizes (n_layers, d_model, n_heads,
    n_kv_heads, d_head, d_vocab, n_ctx) come from its config and modules.

    Raises `UnknownNameError` for a family whose modules cannot be found and `SelfTestError` where the access does not
    reproduce the model (see self_test.py), unless `self_test=False`.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        note: str = "",
        revision: str | None = None,
        gates: dict[str, Tensor] | None = None,
        self_test: bool = True,
    ):
        self.hf = hf
        self.tokenizer = tokenizer
        self.name = name or hf.config.name_or_path or hf.config.model_type
        self.note = note or self.name
        """One sentence of provenance, to stand beside every number measured on this model."""
        self.revision = revision
        self.family = find_family(hf)
        self.n_layers: int = hf.config.num_hidden_layers
        self.n_heads: int = hf.config.num_attention_heads
        self.d_model: int = hf.config.hidden_size
        self.d_vocab: int = hf.config.vocab_size
        self.places = Places(hf, self.family, self.n_layers, self.n_heads)
        self.attention_layers: list[int] = [
            layer for layer, attention in enumerate(self.places.attentions) if attention is not None
        ]
        """The layers with softmax attention; in hybrid models not all."""
        self._accepts_positions = "position_ids" in signature(type(hf).forward).parameters
        if gates is not None:
            restore_gates(self, gates)
        if self_test:
            check_model(self)

    @property
    def gates(self) -> Gates | None:
        """The edge gates of a sparse model (gates.py), None for a dense one."""
        return find_gates(self.hf)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: DType = "float32",
        device: Device = "cpu",
        revision: str | None = None,
        tokenizer: bool = True,
        self_test: bool = True,
    ) -> Self:
        """Loads a model by Hugging Face id, by local folder, or by one of our names: `smollm2`, `clearhead-tiny`.

        dtype is float32, bfloat16, float16, float64, or auto (that of the file); device is a torch device, or auto: an
        accelerator where there is one. Weights are read from safetensors only, and the code of the repository is never
        run. With CLEARHEAD_OFFLINE or HF_HUB_OFFLINE set, only what is on this machine is used.

        Raises `UnknownNameError` for a model that cannot be found, `CorruptFileError` for one that cannot be read.
        """
        loaded = load_model(name, dtype=dtype, device=device, revision=revision, tokenizer=tokenizer)
        return cls(
            loaded.hf,
            loaded.tokenizer,
            name=name,
            note=loaded.note,
            revision=loaded.revision,
            gates=loaded.gates,
            self_test=self_test,
        )

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, {self.family.name}: {self.n_layers} layers, d_model {self.d_model},"
            f" {self.n_heads} heads, {self.dtype} on {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.hf.dtype

    @cached_property
    def n_kv_heads(self) -> int:
        """Key and value heads of the first layer with attention; see `geometry` for a layer's own."""
        return self.geometry(self.attention_layers[0]).n_kv_heads

    @cached_property
    def d_head(self) -> int:
        """Width of queries and keys in the first layer with attention; see `geometry` for a layer's own."""
        return self.geometry(self.attention_layers[0]).d_head

    @cached_property
    def n_ctx(self) -> int | None:
        """The longest sequence the model was built for; None where positions have no limit (ALiBi)."""
        settings = self.hf.config.to_dict()
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        return next((settings[name] for name in names if settings.get(name)), None)

    def geometry(self, layer: int) -> geometry.AttentionGeometry:
        """Heads, widths, scale, window, soft-cap and rotation of one layer's attention."""
        return geometry.attention_geometry(self, layer)

    def weights(self, layer: int) -> weights.AttentionWeights:
        """W_Q, W_K, W_V, W_O and biases of one layer, per head."""
        return weights.attention_weights(self, layer)

    def tokenize(self, text: str | list[str], *, special_tokens: bool = True) -> Int[Tensor, "b t"]:
        """The token ids of one text, or of several that have equally many tokens.

        Raises `ClearheadError` without a tokenizer, for an empty text, and for texts of different lengths, which
        `tokenize_padded` takes.
        """
        return tokenize_texts(self._tokenizer(), text, special_tokens).to(self.device)

    def tokenize_padded(
        self, texts: list[str], *, side: str = "left", special_tokens: bool = True
    ) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """The token ids of texts of different lengths and the attention mask to run them with (0 at padding)."""
        tokens, mask = pad_texts(self._tokenizer(), texts, side, special_tokens)
        return tokens.to(self.device), mask.to(self.device)

    def token_strings(self, ids: Iterable[int] | Int[Tensor, " t"]) -> list[str]:
        r"""Each token decoded alone, its leading space kept; bytes that are not valid UTF-8 are shown as `\xNN`.

        Raises `ClearheadError` without a tokenizer, and for ids outside the model's vocabulary.
        """
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < self.d_vocab:
                raise ClearheadError(f"token id {number} is outside the vocabulary of 0 to {self.d_vocab - 1}")
        return [self._vocabulary_strings[number] for number in numbers]

    @cached_property
    def _vocabulary_strings(self) -> list[str]:
        return vocabulary_strings(self._tokenizer(), self.d_vocab)

    def run(
        self,
        tokens: Int[Tensor, "..."],
        *,
        read: Iterable[str | Site] = ("logits",),
        edit: Mapping[str, Edit] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        grad: bool = False,
        path: Path | None = None,
        begin: tuple[int, Float[Tensor, "b t d"]] | None = None,
        positions: Sequence[int] | None = None,
    ) -> Run:
        """One forward over tokens [b, t] that reads and edits sites (see sites.py for names and shapes).

        read: the sites to return; `attn_in.*` stands for every layer.
        edit: what a site is to hold: a tensor of its shape, or a function of (value, run) that returns one, where `run`
            holds the sites of `read` that the forward has passed. Everything downstream sees the edited value.
        attention_mask: [b, t], 1 at tokens and 0 at padding, on either side; positions then count the tokens alone.
        grad: keep the graph, so that gradients flow through reads and edits; sites that need no gradient yet (frozen
            weights) are made to need one. Without it nothing is kept.
        path: "eager" puts the run on the eager path though nothing needs it, so that it can be compared bit for bit
            with one that does; "sdpa" refuses sites that need the eager path.
        begin: (layer, stream): the forward starts at that layer, which receives the stream [b, t, d] ([1, t, d] for the
            same one in all rows) in place of what the layers below would give it. They are not run and have no sites.
            With the stream that a run of the same tokens read at `resid_pre`, on the same path and in as many rows, all
            that follows is bit for bit that run; with another number of rows matrix products may round differently.
        positions: where logits are computed, all rows alike; negative ones count from the end. `logits` is then
            [b, len(positions), v], and equal to that part of the whole up to the rounding of the last product.
        In a model with edge gates both paths are gated, hard outside of `gates.sampled` and `gates.opened`; scores are
        those before the gates, pattern is what multiplies the values.

        The model computes in eval mode and is left as it was found, whatever is raised.
        Raises `UnknownNameError` and `ClearheadError` for bad sites, tokens, masks and edits.
        """
        tokens, attention_mask = self._check_input(tokens, attention_mask)
        after_norms = self.family.post_attention_norm is not None
        reads = expand(read, self.n_layers, post_norms=after_norms)
        edits = self._expand_edits(edit or {}, after_norms)
        for site in (*reads, *edits):
            self.places.refuse_unavailable(site)
        if begin is not None:
            begin = self._check_begin(*begin, tokens, {*reads, *edits})
        run = Run(tokens, attention_mask, self._choose_path({*reads, *edits}, path), self.n_layers)
        recorder = Recorder(run, reads, edits, grad=grad)
        recorder.layer_of = {
            attention: layer for layer, attention in enumerate(self.places.attentions) if attention is not None
        }
        if recorder.pending:
            self._forward(recorder, begin, _check_positions(positions, tokens.shape[1]))
        recorder.check_unchanged()
        if recorder.pending:
            raise ClearheadError(self.places.explain_missing(min(recorder.pending)))
        return run

    def _forward(
        self, recorder: Recorder, begin: tuple[int, Tensor] | None, positions: Int[Tensor, " p"] | None
    ) -> None:
        """Runs the model under the recorder until its last site."""
        run = recorder.run
        inputs: dict[str, Tensor] = {"input_ids": run.tokens}
        if run.attention_mask is not None:
            inputs["attention_mask"] = run.attention_mask
            if self._accepts_positions:
                inputs["position_ids"] = (run.attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        with ExitStack() as stack:
            stack.enter_context(recording(recorder))
            stack.enter_context(torch.set_grad_enabled(recorder.grad))
            stack.enter_context(self.evaluating())
            stack.enter_context(attention_implementation(self.hf, self._implementation(recorder)))
            if begin is not None:
                stack.enter_context(self.places.begun(recorder, *begin))
            stack.enter_context(self.places.watched(recorder))
            if positions is not None:
                stack.enter_context(self.places.unembedding_at(recorder, positions.to(self.device)))
            if not self.family.interface and any(site.name in SOFTMAX_SITES for site in recorder.sites):
                stack.enter_context(tap_forward(recorder))
            try:
                logits = self.hf(**inputs, use_cache=False).logits
                recorder.visit(Site("logits"), logits)
            except Finished:
                pass

    def _implementation(self, recorder: Recorder) -> str:
        """The name of the attention implementation: HF's own, or ours to look inside or to close gates."""
        ours = self.gates is not None or any(site.name in FUNCTION_SITES for site in recorder.sites)
        return NAMES[recorder.run.path] if ours and self.family.interface else recorder.run.path

    def _choose_path(self, sites: set[Site], asked: Path | None) -> Path:
        """The path: sdpa unless the softmax is looked at, the caller asks for eager, or the family has no sdpa."""
        opened = sorted(str(site) for site in sites if site.name in SOFTMAX_SITES)
        available = type(self.hf)._supports_sdpa and self.family.sdpa
        if asked == "sdpa" and (opened or not available):
            reason = f"{opened[0]} exists only on the eager path" if opened else f"{self.family.name} has no sdpa path"
            raise ClearheadError(f"path='sdpa': {reason}; leave out path")
        return "eager" if opened or asked == "eager" or not available else "sdpa"

    @contextmanager
    def evaluating(self):
        """Eval mode for the time of a forward; puts back the modules that were training."""
        training = [module for module in self.hf.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True

    def _expand_edits(self, edit: Mapping[str, Edit], post_norms: bool) -> dict[Site, Edit]:
        """Every edited site with its edit; a site edited twice is refused."""
        edits: dict[Site, Edit] = {}
        for pattern, value in edit.items():
            for site in expand([pattern], self.n_layers, post_norms=post_norms):
                if site in edits:
                    raise ClearheadError(f"site {site} is edited twice; {pattern!r} names it again")
                edits[site] = value
        return edits

    def _check_input(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and mask on the model's device. Raises `ClearheadError` for what the model cannot run."""
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dim() != 2 or tokens.numel() == 0:
            given = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ClearheadError(
                f"tokens: expected integers [batch, position], got {given}; a text is turned into tokens by tokenize,"
                " a single row by tokens[None]"
            )
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= self.d_vocab:
            raise ClearheadError(f"tokens: ids must be 0 to {self.d_vocab - 1}, got {low if low < 0 else high}")
        if self.n_ctx is not None and tokens.shape[1] > self.n_ctx:
            raise ClearheadError(f"tokens: {tokens.shape[1]} positions, but the context of {self.name} is {self.n_ctx}")
        if attention_mask is None:
            return tokens.to(self.device), None
        if attention_mask.shape != tokens.shape:
            raise ClearheadError(
                f"attention_mask: expected shape {list(tokens.shape)}, got {list(attention_mask.shape)}"
            )
        if not bool(attention_mask.bool().any(dim=1).all()):
            raise ClearheadError("attention_mask: a row hides all of its tokens")
        return tokens.to(self.device), attention_mask.to(self.device)

    def _check_begin(self, layer: int, stream: Tensor, tokens: Tensor, sites: set[Site]) -> tuple[int, Tensor]:
        """The layer counted from the front and the stream with a row per row of tokens."""
        if not -self.n_layers <= layer < self.n_layers:
            raise ClearheadError(f"begin: layer {layer} does not exist: the model has layers 0 to {self.n_layers - 1}")
        layer %= self.n_layers
        rows, length = tokens.shape
        if stream.shape not in ((rows, length, self.d_model), (1, length, self.d_model)):
            raise ClearheadError(
                f"begin: expected the stream that layer {layer} receives, [{rows}, {length}, {self.d_model}] for these"
                f" tokens, got {list(stream.shape)}; read it with read=['resid_pre.{layer}']"
            )
        below = sorted(
            site for site in sites if site.name == "embed" or (site.layer is not None and site.layer < layer)
        )
        if below:
            raise ClearheadError(f"begin: site {below[0]} lies below layer {layer}, where the forward begins")
        self.places.refuse_beginning(layer)
        return layer, stream.to(self.device, self.dtype).expand(rows, -1, -1)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ClearheadError(f"{self.name} was loaded without a tokenizer; pass token ids, or load it with one")
        return self.tokenizer


def _check_positions(positions: Sequence[int] | None, length: int) -> Int[Tensor, " p"] | None:
    """Positions counted from the front."""
    if positions is None:
        return None
    bad = [position for position in positions if not -length <= position < length]
    if bad or not positions:
        given = f"got {bad[0]}" if bad else "got none"
        raise ClearheadError(f"positions: expected at least one of 0 to {length - 1} (or -{length} to -1), {given}")
    return torch.tensor([position % length for position in positions])
