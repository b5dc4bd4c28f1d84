"""The places of a model outside its attention function, and the hooks that read and edit them.

Each site is the input or the output of one module of the family's table, or part of it:

- resid_pre, resid_post: the layer's input and output; attn_in, mlp_in: the module's input; mlp_out: its output;
- attn_out: the output of the output projection W_O;
- resid_mid: the input of the norm before the MLP. The layer keeps the same tensor as its residual stream, so an edit is
  written into it in place and both branches see it;
- q_pre, k_pre: the projection's output, split where it is fused with others;
- head_out: z_h · W_O,h for each head h, so that Σ_h head_out + b_O = attn_out. An edit adds Σ_h (new − old) to
  attn_out;
- off the attention interface: z is the input of W_O, and q, k, v are projections where the family uses them as they
  are.

Not here: q, k, v, scores, pattern and z of families on the interface (attention.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError
from clearhead.model.families import Family, find_module
from clearhead.model.run import Recorder, current_recorder
from clearhead.model.sites import ATTENTION_SITES, FUNCTION_SITES, SITES, SOFTMAX_SITES, Site

Show = Callable[[Tensor], Tensor]


class Places:
    """The modules of one model, by layer and role."""

    def __init__(self, hf: PreTrainedModel, family: Family, n_layers: int, n_heads: int):
        self.family = family
        self.n_heads = n_heads
        self.config = hf.config
        self.embedding = require_module(hf, family.embedding)
        self.unembedding = hf.get_output_embeddings()
        self.layers = [require_module(hf, f"{family.layers}.{layer}") for layer in range(n_layers)]
        self.attentions = [find_module(layer, family.attention) for layer in self.layers]

    def refuse_unavailable(self, site: Site) -> None:
        """Raises `ClearheadError` with the reason where this model has no such site."""
        family, name, layer = self.family, site.name, site.layer
        if layer is None:
            return
        model = f"{family.name} model"
        if name in ATTENTION_SITES and self.attentions[layer] is None:
            have = [i for i, attention in enumerate(self.attentions) if attention is not None]
            raise ClearheadError(
                f"site {site}: layer {layer} of this {model} has no softmax attention (layers {have} have)"
            )
        if name == "resid_mid" and family.parallel:
            raise ClearheadError(
                f"site {site}: in this {model} attention and MLP run in parallel on resid_pre, so no residual stream"
                f" lies between them; read resid_pre.{layer} or resid_post.{layer}"
            )
        if name == "k_pre" and family.layout == "latent":
            raise ClearheadError(
                f"site {site}: the keys of this {model} come from a latent shared by all heads, not from one"
                f" projection; read k.{layer}"
            )
        if name in {"q", "k", "v"} and not family.interface and name not in family.plain:
            raise ClearheadError(
                f"site {site}: this {model} changes {name} between projection and scores outside transformers'"
                f" attention interface, where it can be neither read nor written; available there are"
                f" {', '.join(sorted(family.plain | SOFTMAX_SITES | {'q_pre', 'k_pre', 'z', 'head_out'}))}"
            )

    def explain_missing(self, site: Site) -> str:
        """Why a forward can have ended without passing `site`."""
        if site.name == "sink":
            return f"site {site}: attention in this {self.family.name} model has no sink"
        return f"site {site} was not passed in the forward: layer {site.layer} did not call its module"

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[None]:
        """Hooks every place that the recorder wants, and removes the hooks, whatever happens in between."""
        handles: list[RemovableHandle] = []
        try:
            # hooks on one module run in the order of their registration: that of the sites within a layer
            for site in sorted(recorder.sites, key=lambda site: (site.layer or 0, SITES.index(site.name))):
                in_function = self.family.interface and site.name in FUNCTION_SITES
                if not in_function and site.name not in SOFTMAX_SITES and site.name != "logits":
                    handles.append(self._watch(site, recorder))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def refuse_beginning(self, layer: int) -> None:
        """Raises `ClearheadError` where a forward cannot begin at `layer`, because later layers need earlier ones."""
        borrowed = self.config.to_dict().get("num_kv_shared_layers") or 0
        if layer and borrowed:
            raise ClearheadError(
                f"begin: the last {borrowed} layers of this {self.family.name} model use keys and values of earlier"
                " layers, so no forward can begin between them; leave out begin"
            )

    @contextmanager
    def begun(self, recorder: Recorder, begin: int, stream: Float[Tensor, "b t d"]) -> Iterator[None]:
        """Gives layer `begin` the stream, and makes the layers below pass on what they receive without computing."""

        def check(_module: nn.Module, _args: tuple, output: Any) -> None:
            if current_recorder() is recorder and isinstance(output, tuple) == self.family.interface:
                raise ClearheadError(
                    f"begin: layers of this {self.family.name} model return a {type(output).__name__}, which was not"
                    " expected of this family; leave out begin"
                )

        layers = self.layers[:begin]
        found = [vars(layer).get("forward") for layer in layers]  # set on the instance by whoever wrapped the layer
        handles = [
            _hook_input(self.layers[begin], recorder, lambda _: stream),
            self.layers[begin].register_forward_hook(check),
        ]
        try:
            for layer in layers:
                layer.forward = _passing(layer.forward, recorder, self.family.interface)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer, forward in zip(layers, found, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward

    @contextmanager
    def unembedding_at(self, recorder: Recorder, positions: Int[Tensor, " p"]) -> Iterator[None]:
        """Lets the unembedding see only these positions. Raises `ClearheadError` for a model without one."""
        if self.unembedding is None:
            raise ClearheadError(f"positions: this {self.family.name} model has no unembedding; leave out positions")
        handle = _hook_input(self.unembedding, recorder, lambda x: x[:, positions])
        try:
            yield
        finally:
            handle.remove()

    def _watch(self, site: Site, recorder: Recorder) -> RemovableHandle:
        """Hooks the place of `site`."""
        family = self.family

        def show(value: Tensor) -> Tensor:
            return recorder.visit(site, value)

        if site.layer is None:
            return _hook_output(self.embedding, recorder, show)
        layer, attention = self.layers[site.layer], self.attentions[site.layer]
        match site.name:
            case "resid_pre":
                return _hook_input(layer, recorder, show)
            case "resid_post":
                return _hook_output(layer, recorder, show)
            case "resid_mid":
                return self._watch_middle(layer, recorder, site)
            case "mlp_in":
                return _hook_input(require_module(layer, family.mlp_input), recorder, _in_batch(recorder, show))
            case "mlp_out":
                shown = _kept_from_writes(show) if family.mlp_output_mutated else show
                return _hook_output(require_module(layer, family.mlp_output), recorder, _in_batch(recorder, shown))
        assert attention is not None, "refuse_unavailable lets no attention site of such a layer pass"
        output = require_module(attention, family.output)
        match site.name:
            case "attn_in":
                return _hook_input(attention, recorder, show)
            case "attn_out":
                return _hook_output(output, recorder, show)
            case "z":
                return _hook_input(output, recorder, self._show_heads(show))
            case "head_out":
                return self._watch_heads(output, recorder, site)
            case _:
                return self._watch_projection(attention, recorder, site)

    def _watch_middle(self, layer: nn.Module, recorder: Recorder, site: Site) -> RemovableHandle:
        """resid_mid: an edit is copied into the tensor, which the layer also adds the MLP's output to."""

        def show(stream: Tensor) -> Tensor:
            if not recorder.edits(site):
                return recorder.visit(site, stream)
            stream.copy_(recorder.visit(site, stream.clone()))
            return stream

        place = self.family.mlp_norm or self.family.mlp_input
        return _hook_input(require_module(layer, place), recorder, _in_batch(recorder, show))

    def _show_heads(self, show: Show) -> Show:
        """Shows the input [b, t, h·dv] of the output projection as [b, t, h, dv]."""

        def shown(x: Tensor) -> Tensor:
            return show(x.unflatten(-1, (self.n_heads, -1))).flatten(-2)

        return shown

    def _watch_heads(self, output: nn.Module, recorder: Recorder, site: Site) -> RemovableHandle:
        """head_out: computed from the output projection's input and weight."""
        weight, bias = output_weight(output)

        def hook(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
            if current_recorder() is not recorder:
                return None
            heads = args[0].unflatten(-1, (self.n_heads, -1))
            old = torch.einsum("bthv,hvd->bthd", heads, weight.unflatten(0, (self.n_heads, -1)))
            new = recorder.visit(site, old)
            if not recorder.rewrites(site):
                return None
            # the value changes by the edit alone, exactly; gradients flow through what was shown and no other way
            out = out.detach() + (new - old.detach()).sum(dim=-2)
            return out if bias is None else out + (bias - bias.detach())

        return output.register_forward_hook(hook)

    def _watch_projection(self, attention: nn.Module, recorder: Recorder, site: Site) -> RemovableHandle:
        """q_pre, k_pre, and off the interface q, k, v: their part of a projection's output, by head."""
        family, part = self.family, site.name[0]
        path = {"q": family.query, "k": family.key, "v": family.value}[part] or family.query
        d_head = output_weight(require_module(attention, family.output))[0].shape[0] // self.n_heads

        def show(projected: Tensor) -> Tensor:
            slot = self._slot(projected, part, d_head)
            value = slot.flatten(2, -2).transpose(1, 2)
            new = recorder.visit(site, value)
            if not recorder.rewrites(site):
                return projected
            rebuilt = projected.clone()
            target = self._slot(rebuilt, part, d_head)
            target.copy_(new.transpose(1, 2).reshape(target.shape))
            return rebuilt

        return _hook_output(require_module(attention, path), recorder, show)

    def _slot(self, x: Float[Tensor, "b t o"], part: str, d_head: int) -> Float[Tensor, "b t *heads dh"]:
        """The view of a projection's output that holds the queries, keys or values, heads before width."""
        h = self.n_heads
        match self.family.layout:
            case "latent":
                return x.unflatten(-1, (h, -1))
            case "gated" if part == "q":
                return x.unflatten(-1, (h, 2, -1))[..., 0, :]
            case "separate" | "gated":
                return x.unflatten(-1, (h, -1) if part == "q" else (-1, d_head))
            case "blocks":
                g = (x.shape[-1] // d_head - h) // 2
                start, count = {"q": (0, h), "k": (h, g), "v": (h + g, g)}[part]
                return x.unflatten(-1, (-1, d_head))[..., start : start + count, :]
            case "groups":
                g = (x.shape[-1] // d_head - h) // 2
                grouped = x.unflatten(-1, (g, h // g + 2, d_head))
                return {"q": grouped[..., :-2, :], "k": grouped[..., -2:-1, :], "v": grouped[..., -1:, :]}[part]
            case "shards":
                return x.unflatten(-1, (4, 3, h // 4, d_head))[..., "qvk".index(part), :, :]


def output_weight(module: nn.Module) -> tuple[Float[Tensor, "i o"], Float[Tensor, " o"] | None]:
    """The weight of an output projection as [in, out], and its bias.

    Raises `ClearheadError` for anything but a dense linear layer: quantised and adapted ones have no such weight.
    """
    if isinstance(module, nn.Linear) and module.weight.is_floating_point():
        return module.weight.T, module.bias
    if isinstance(module, Conv1D):
        return module.weight, module.bias
    raise ClearheadError(
        f"the output projection is a {type(module).__name__}, not a dense linear layer: its weight cannot be split into"
        " heads (load the model unquantised, and merge adapters)"
    )


def _hook_input(module: nn.Module, recorder: Recorder, show: Show) -> RemovableHandle:
    """Shows the module's first input."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if current_recorder() is not recorder:
            return None
        if args:
            return (show(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs)) if "hidden_states" not in kwargs else "hidden_states"
        return args, kwargs | {name: show(kwargs[name])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _hook_output(module: nn.Module, recorder: Recorder, show: Show) -> RemovableHandle:
    """Shows the module's output, or the first of them."""

    def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
        if current_recorder() is not recorder:
            return None
        return (show(output[0]), *output[1:]) if isinstance(output, tuple) else show(output)

    return module.register_forward_hook(hook)


def _passing(forward: Callable[..., Any], recorder: Recorder, bare: bool) -> Callable[..., Any]:
    """A layer's forward that returns its input, in the form of the family's output; other forwards are untouched."""

    def passed(*args: Any, **kwargs: Any) -> Any:
        if current_recorder() is not recorder:
            return forward(*args, **kwargs)
        stream = args[0] if args else kwargs["hidden_states"]
        return stream if bare else (stream, None)

    return passed


def _in_batch(recorder: Recorder, show: Show) -> Show:
    """Shows [b·t, d] as [b, t, d]: some families flatten batch and position before the MLP."""

    def shown(x: Tensor) -> Tensor:
        if x.dim() == 3:
            return show(x)
        return show(x.view(*recorder.run.tokens.shape, -1)).view_as(x)

    return shown


def _kept_from_writes(show: Show) -> Show:
    """Continues with a copy of what was shown, because the layer adds to it in place."""

    def shown(x: Tensor) -> Tensor:
        return show(x).clone()

    return shown


def require_module(root: nn.Module, path: str) -> nn.Module:
    """The submodule at `path`."""
    module = find_module(root, path)
    if module is None:
        raise ClearheadError(f"{type(root).__name__} has no module {path!r}")
    return module
