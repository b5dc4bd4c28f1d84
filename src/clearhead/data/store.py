"""A layer's activations on disk: computed once, read by many trainings.

    STORE/index.json                 what was harvested, and every whole shard with its size and sha256
    STORE/shard-00000.safetensors    tokens [b, t] int64, x [b, t, d], y [b, t, d] of consecutive blocks

Written shard by shard, each whole before the index names it: a killed harvest continues with the next shard, and a
full disk loses only the shard being written. Read through memory maps: a batch touches its own rows alone. Opening
checks every shard's size; the first batch from a shard checks its sha256.

Several layers are harvested from one forward pass, each into a store of its own. A batch equals what `LiveActivations`
computes (in float32 to the last bit; float16 and bfloat16 round).
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.data.harvest import ATTENTION, Activations, LiveActivations, batches, check_indices, refuse_non_finite
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.hub import sha256_of
from clearhead.runs import RunDirectory, progress, read_json, write_json, written_aside

SCHEMA = 1
StoreDtype = Literal["float32", "float16", "bfloat16"]
SHARD_BYTES = 64 * 2**20
BUFFER_BYTES = 512 * 2**20
"""Memory for the shards that several stores fill at once."""


def write_store(
    path: str | Path,
    source: LiveActivations,
    *,
    batch_blocks: int = 8,
    dtype: StoreDtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> "ActivationStore":
    """Harvest every block of `source` into `path`, or finish what an earlier call began there; returns the store.

    Errors as for `write_stores`.
    """
    return write_stores({Path(path): source}, batch_blocks=batch_blocks, dtype=dtype, shard_bytes=shard_bytes)[0]


def write_stores(
    sources: Mapping[Path, LiveActivations],
    *,
    batch_blocks: int = 8,
    dtype: StoreDtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> list["ActivationStore"]:
    """Harvest several layers of one model and text, each into a store of its own, from one forward pass.

    What an earlier call began is finished: a store that is behind the others catches up alone. Raises `ClearheadError`
    when a path holds another model's, layer's or text's activations or another process writes there, and when the disk
    is full (the shards before stay valid); `NonFiniteError` for NaN, infinity, or a value that float16 cannot hold.
    """
    if dtype not in get_args(StoreDtype):
        raise UnknownNameError("dtype of a store", dtype, get_args(StoreDtype))
    shard_bytes = min(shard_bytes, BUFFER_BYTES // len(sources))
    with contextlib.ExitStack() as locks:
        for path in sources:
            locks.enter_context(RunDirectory(path))
        growing = [_Growing(path, source, dtype, shard_bytes) for path, source in sources.items()]
        context, blocks = growing[0].source.context, len(growing[0].source)
        done = min(store.done for store in growing)
        with progress("harvest", blocks * context, done=done * context) as advance:
            while behind := _furthest_behind(growing):
                _grow(behind, batch_blocks)
                before, done = done, min(store.done for store in growing)
                advance((done - before) * context)
    return [ActivationStore(path) for path in sources]


class _Growing:
    """A store that is being written: where it stands, and what its next shard holds."""

    def __init__(self, path: Path, source: LiveActivations, dtype: StoreDtype, shard_bytes: int):
        self.path, self.source = path, source
        self.dtype: StoreDtype = dtype
        number_bytes = 4 if dtype == "float32" else 2
        block_bytes = source.context * (2 * source.d * number_bytes + 8)
        self.index = _begin(path, _header(source, dtype), max(1, shard_bytes // block_bytes))

    @property
    def done(self) -> int:
        """Blocks that are on the disk."""
        return sum(shard["blocks"] for shard in self.index["shards"])

    @property
    def stop(self) -> int:
        """Where the next shard ends."""
        return min(self.done + self.index["shard_blocks"], len(self.source))

    def add(self, batches: list[Activations]) -> None:
        """Write the next shard, then the index that names it."""
        self.index["shards"].append(_write_shard(self.path, len(self.index["shards"]), batches))
        write_json(self.path / "index.json", self.index)


def _furthest_behind(growing: list[_Growing]) -> list[_Growing]:
    """The stores whose next shard holds the earliest blocks that are missing; none when all are whole."""
    unfinished = [store for store in growing if store.done < len(store.source)]
    earliest = min(((store.done, store.stop) for store in unfinished), default=None)
    return [store for store in unfinished if (store.done, store.stop) == earliest]


def _grow(stores: list[_Growing], batch_blocks: int) -> None:
    """Add one shard to each of `stores`, which lack the same blocks."""
    sources = [store.source for store in stores]
    gathered: list[list[Activations]] = [[] for _ in stores]
    start, stop = stores[0].done, stores[0].stop
    for first in range(start, stop, batch_blocks):
        blocks = torch.arange(first, min(first + batch_blocks, stop))
        for store, parts, batch in zip(stores, gathered, batches(sources, blocks), strict=True):
            parts.append(_stored(batch, store.source.sites, blocks, store.dtype))
    for store, parts in zip(stores, gathered, strict=True):
        store.add(parts)


def store_of_layer(path: Path, layer: int) -> Path:
    """The directory itself where it is a store, or that of the layer in a folder of several."""
    own = path / str(layer)
    return own if (own / "index.json").exists() and not (path / "index.json").exists() else path


class ActivationStore:
    """Serves activations of numbered blocks from a store on disk, as `LiveActivations` does from the model.

    `index` holds what was harvested: model, layer, sites, text. Raises `ClearheadError` when the harvest is not
    finished, `CorruptFileError` naming the shard that is missing, truncated or altered.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "index.json").exists():
            raise ClearheadError(
                f"{path} is no activation store: it holds no index.json; `clearhead harvest` makes one"
            )
        self.index = _read_index(self.path)
        self.context: int = self.index["context"]
        self.d: int = self.index["d"]
        self._files: dict[int, Any] = {}
        n_blocks = sum(shard["blocks"] for shard in self.index["shards"])
        for shard in self.index["shards"]:
            self._check_size(shard)
        if n_blocks != len(self):
            raise ClearheadError(
                f"the harvest in {path} was interrupted after {n_blocks:,} of {len(self):,} blocks; "
                f"repeat the command that began it, and it continues there"
            )

    def __len__(self) -> int:
        return self.index["blocks"]

    def check(
        self,
        *,
        model: str,
        layer: int,
        sites: tuple[str, str] = ATTENTION,
        repeat_share: float | None = None,
        text_sha256: str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
    ) -> None:
        """Raise `ClearheadError` unless the store holds this model's values at these sites of this layer.

        repeat_share and text_sha256 (of the token blocks), dtype and revision of the model are compared where they are
        given; the revision only where the store names one, as local folders have none.
        """
        asked: dict[str, Any] = {"model": model, "layer": layer, "sites": [f"{site}.{layer}" for site in sites]}
        if repeat_share is not None:
            asked["repeat_share"] = repeat_share
        if text_sha256 is not None:
            asked["text_sha256"] = text_sha256
        if dtype is not None:
            asked["model_dtype"] = _name(dtype)
        if revision is not None and self.index["model_revision"] is not None:
            asked["model_revision"] = revision
        _refuse_other(self.path, self.index, asked)

    def batch(self, block_indices: Int64[Tensor, " b"] | Sequence[int]) -> Activations:
        """Activations of these blocks, in this order, x and y in float32 on the CPU.

        Raises `CorruptFileError` on the first touch of a shard whose content is not what was written.
        """
        chosen = check_indices(block_indices, len(self))
        per_shard = self.index["shard_blocks"]
        rows = [self._row(int(block) // per_shard, int(block) % per_shard) for block in chosen]
        return Activations(*(torch.cat(parts) for parts in zip(*rows, strict=True)))

    def _row(self, shard: int, row: int) -> Activations:
        file = self._open(shard)
        tokens, x, y = (file.get_slice(name)[row : row + 1] for name in Activations._fields)
        return Activations(tokens, x.float(), y.float())

    def _open(self, number: int) -> Any:
        if number not in self._files:
            shard = self.index["shards"][number]
            path = self.path / shard["file"]
            self._check_size(shard)
            if sha256_of(path) != shard["sha256"]:
                raise CorruptFileError(f"{path} is not what was written: its sha256 differs. {_remedy(self.path)}")
            try:
                self._files[number] = safe_open(path, "pt")
            except SafetensorError as error:
                raise CorruptFileError(f"{path} cannot be read ({error}). {_remedy(self.path)}") from error
        return self._files[number]

    def _check_size(self, shard: dict[str, Any]) -> None:
        path = self.path / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise CorruptFileError(f"{path} {found}. {_remedy(self.path)}")


def _header(source: LiveActivations, dtype: StoreDtype) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": source.model.name,
        "model_note": source.model.note,
        "model_revision": source.model.revision,
        "model_dtype": _name(source.model.dtype),
        "layer": source.layer,
        "sites": list(source.sites),
        "text": source.blocks.source,
        "split": source.blocks.split,
        "repeat_share": source.blocks.repeat_share,
        "text_sha256": source.blocks.sha256,
        "context": source.context,
        "d": source.d,
        "blocks": len(source),
        "dtype": dtype,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _begin(path: Path, header: dict[str, Any], shard_blocks: int) -> dict[str, Any]:
    """The index to continue from, whose shards keep their size; leftovers of a killed process are removed."""
    for part in path.glob(".*.part"):
        part.unlink()
    if not (path / "index.json").exists():
        return header | {"shard_blocks": shard_blocks, "shards": []}
    index = _read_index(path)
    _refuse_other(path, index, header)
    return index


def _read_index(path: Path) -> dict[str, Any]:
    index = read_json(path / "index.json")
    if not isinstance(index, dict) or index.get("schema") != SCHEMA or "shards" not in index:
        raise CorruptFileError(f"{path / 'index.json'} is not the index of an activation store of schema {SCHEMA}")
    index.setdefault("repeat_share", 0.0)  # stores of earlier versions do not name it
    return index


def _refuse_other(path: Path, index: dict[str, Any], asked: dict[str, Any]) -> None:
    other = [f"{key} {index.get(key)!r}, not {value!r}" for key, value in asked.items() if index.get(key) != value]
    if other:
        raise ClearheadError(f"the store {path} holds {'; '.join(other)}. Name another directory, or delete this one")


def _stored(batch: Activations, sites: tuple[str, str], blocks: Int64[Tensor, " b"], dtype: StoreDtype) -> Activations:
    kept = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    rounded = Activations(batch.tokens.cpu(), batch.x.to("cpu", kept), batch.y.to("cpu", kept))
    for values, site in zip(rounded[1:], sites, strict=True):
        refuse_non_finite(values, site, blocks, f"{dtype} cannot hold it; store bfloat16 or float32.")
    return rounded


def _write_shard(path: Path, number: int, parts: list[Activations]) -> dict[str, Any]:
    columns = dict(zip(Activations._fields, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True))
    content = safetensors.torch.save(columns)
    shard = path / f"shard-{number:05d}.safetensors"
    with written_aside(shard) as aside:
        aside.write_bytes(content)
    return {
        "file": shard.name,
        "blocks": len(columns["tokens"]),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _remedy(path: Path) -> str:
    return f"Delete {path} and harvest again, or restore the file from a copy."
