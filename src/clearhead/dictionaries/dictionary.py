"""How a dictionary is kept on disk and on the hub: `model.safetensors`, `config.json` and a model card.

`config.json` holds the kind, the schema version, the module's configuration, where it belongs (model, layer, sites)
and the metrics it was published with. Unknown keys are refused with the nearest known one, so a file written by a
newer version never loads half. No pickle is read or written.
"""

import dataclasses
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from clearhead import __version__
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.hub import offline
from clearhead.runs import read_json, write_json, written_aside

SCHEMA = 1
TOP_KEYS = ("kind", "schema", "clearhead", "config", "provenance", "metrics")


def check_keys(given: dict[str, Any], valid: tuple[str, ...], where: str, version: str = "") -> None:
    """Raise `UnknownNameError` for the first key of `given` that is not in `valid`."""
    for key in given:
        if key not in valid:
            hint = f"({where}" + (f", written by clearhead {version}" if version else "") + ")"
            raise UnknownNameError("configuration key", key, valid, hint)


def config_from(cls: Any, values: dict[str, Any], where: str, version: str = "") -> Any:
    """Build the frozen dataclass `cls` from a dictionary, refusing unknown and missing keys."""
    fields = dataclasses.fields(cls)
    check_keys(values, tuple(f.name for f in fields), where, version)
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise CorruptFileError(f"{where} lacks the keys {missing}; restore the file or train again")
    for field in fields:
        if field.name in values and not _fits(values[field.name], field.type):
            raise CorruptFileError(
                f"{where} has {field.name} = {values[field.name]!r}, expected {field.type}; restore the file"
            )
    return cls(**values)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value read from JSON is of a field's type, to the depth that JSON types go."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return True
        elif option is float and type(value) is int or type(value) is (get_origin(option) or option):
            return True
    return False


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, whole or not at all."""
    with written_aside(path) as aside:
        # as bytes: safetensors' own writer reports a full disk as an error that does not say so
        aside.write_bytes(save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; raises `CorruptFileError` when it is truncated or not one."""
    if not path.exists():
        raise ClearheadError(f"there is no file {path}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CorruptFileError(
            f"{path} is truncated or not a safetensors file ({error}); delete it and write it again"
        ) from error


def save_dictionary(
    folder: str | Path,
    kind: str,
    module: torch.nn.Module,
    config: Any,
    provenance: dict[str, Any],
    metrics: dict[str, float] | None = None,
) -> Path:
    """Write weights, configuration and card of one dictionary into `folder` (created if needed)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", module.state_dict())
    record = {
        "kind": kind,
        "schema": SCHEMA,
        "clearhead": __version__,
        "config": dataclasses.asdict(config),
        "provenance": provenance,
        "metrics": metrics or {},
    }
    _write_record(folder, record)
    return folder


def record_metrics(folder: str | Path, kind: str, metrics: dict[str, float]) -> None:
    """Put measured numbers into the configuration and the card of a saved dictionary; its weights stay as they are."""
    record, _ = load_dictionary(folder, kind)
    _write_record(Path(folder), record | {"metrics": metrics})


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / "config.json", record)
    with written_aside(folder / "README.md") as aside:
        aside.write_text(_card(record["kind"], record), encoding="utf-8")


def load_dictionary(name: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the record (`config.json`) and the tensors of a dictionary of `kind` from a folder or the hub.

    Raises `ClearheadError` when nothing is there or the kind differs, `CorruptFileError` when a file is damaged.
    """
    folder, record = _read_record(name)
    where = str(folder / "config.json")
    check_keys(record, TOP_KEYS, where, str(record.get("clearhead", "")))
    if record["kind"] != kind:
        raise ClearheadError(f"{folder} holds a {record['kind']!r}, and a {kind!r} was asked for")
    if record.get("schema") != SCHEMA:
        raise ClearheadError(
            f"{where} has schema {record.get('schema')!r} and this version of clearhead ({__version__}) reads "
            f"schema {SCHEMA}; install the version that wrote it ({record.get('clearhead')})"
        )
    return record, load_tensors(folder / "model.safetensors")


def kind_of(name: str | Path) -> str:
    """The kind that the `config.json` of a dictionary names; errors as for `load_dictionary`."""
    return str(_read_record(name)[1]["kind"])


def _read_record(name: str | Path) -> tuple[Path, dict[str, Any]]:
    folder = _locate(name)
    record = read_json(folder / "config.json")
    if not isinstance(record, dict) or "kind" not in record:
        where = folder / "config.json"
        raise CorruptFileError(f"{where} is not the configuration of a clearhead dictionary: it has no key 'kind'")
    return folder, record


def load_state(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy tensors into `module`; names and shapes must agree exactly (else `CorruptFileError`)."""
    own = module.state_dict()
    wrong = sorted(set(own) ^ set(tensors))
    wrong += [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
    if wrong:
        raise CorruptFileError(
            f"the weights in {where} do not fit their config.json: {wrong} missing, extra or reshaped"
        )
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise CorruptFileError(f"{broken[0]} in {where} holds NaN or infinity; restore the file or train again")
    module.load_state_dict(tensors)


class SavedDictionary(torch.nn.Module):
    """A module of one kind that is kept in a folder: what all dictionaries share."""

    KIND: ClassVar[str]
    CONFIG: ClassVar[type]
    """The dataclass of its configuration."""

    def __init__(self, config: Any, provenance: dict[str, Any] | None = None):
        super().__init__()
        self.config = config
        self.provenance: dict[str, Any] = provenance or {}
        self.metrics: dict[str, float] = {}

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `model.safetensors`, `config.json` and a card with `provenance` and `metrics` into `folder`."""
        return save_dictionary(folder, self.KIND, self, self.config, self.provenance, self.metrics)

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        """Load from a folder or a hub id; refuses unknown keys and weights that do not fit."""
        record, tensors = load_dictionary(name, cls.KIND)
        config = config_from(cls.CONFIG, record["config"], f"{name}/config.json", str(record.get("clearhead")))
        module = cls(config, record["provenance"])
        load_state(module, tensors, str(name))
        module.metrics = record["metrics"]
        return module.eval()

    def push_to_hub(self, repo_id: str, folder: str | Path, **options: Any) -> str:
        """Save into `folder` and upload it as `repo_id`."""
        return push_to_hub(self.save_pretrained(folder), repo_id, **options)


def push_to_hub(folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a folder of a dictionary or model; returns its address. Raises `ClearheadError` when offline."""
    if offline():
        raise ClearheadError("CLEARHEAD_OFFLINE or HF_HUB_OFFLINE is set; unset it to upload to the hub")
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision))


def _locate(name: str | Path) -> Path:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            layers = sorted(int(own.name) for own in folder.iterdir() if own.name.isdecimal())
            if layers:
                raise ClearheadError(
                    f"{folder} holds a run for each of several layers; name those wanted, as {folder / str(layers[0])}"
                )
            raise ClearheadError(
                f"{folder} holds no config.json; give the folder of a saved dictionary, such as runs/NAME/lorsa"
            )
        return folder
    text = str(name)
    if folder.is_absolute() or text.count("/") != 1 or text.startswith("."):
        raise ClearheadError(f"there is no folder {text}; give a saved dictionary's folder or a hub id ORG/NAME")
    if offline():
        raise ClearheadError(f"there is no folder {text}, and the hub was not asked because offline is set")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.md"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        said = str(error).partition("\n")[0]
        raise ClearheadError(f"there is no folder {text} and the hub gave none by that name: {said}") from error


def _card(kind: str, record: dict[str, Any]) -> str:
    provenance, metrics = record["provenance"], record["metrics"]
    lines = ["---", "library_name: clearhead", "tags: [interpretability, attention]"]
    if "/" in str(provenance.get("model", "")):
        lines.append(f"base_model: {provenance['model']}")
    lines += ["---", "", f"# {kind} for layer {provenance.get('layer')} of {provenance.get('model')}", ""]
    if provenance.get("model_note"):
        lines += [str(provenance["model_note"]), ""]
    lines += [f"Trained with clearhead {record['clearhead']}.", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, (int, float))]
    lines += ["", "```python", f"from clearhead import {kind.capitalize()}", ""]
    lines += [f'dictionary = {kind.capitalize()}.from_pretrained("PATH_OR_HUB_ID")', "```", ""]
    return "\n".join(lines)
