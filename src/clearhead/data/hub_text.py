"""Text from a dataset of the Hugging Face hub, streamed: `owner/name`, or `owner/name:configuration`.

A document is a row's "text" column. Training reads the split "train"; held out is "validation", else "test", else one
row in ten of "train" by a hash of its text, so that equal rows fall on the same side. With HF_HUB_OFFLINE set, only
what `datasets` has in its cache is read. Nothing is executed: `datasets` loads data files only.
"""

import os
from collections.abc import Iterator

import datasets
from huggingface_hub import is_offline_mode

from clearhead.data.document import HELD_OUT_ONE_IN, Document, Split, stable_hash
from clearhead.errors import ClearheadError
from clearhead.hub import offline

FIELD = "text"


def documents(name: str, split: Split) -> Iterator[Document]:
    """The rows of one split of a dataset.

    Raises `ClearheadError` when the dataset, its configuration, a split "train" or a column "text" does not exist, or
    when it cannot be reached.
    """
    if offline() and not is_offline_mode():
        raise ClearheadError(
            f"the network is off (CLEARHEAD_OFFLINE is set), so dataset {name!r} is not fetched. To read it from the "
            f"cache of Hugging Face's libraries set HF_HUB_OFFLINE=1 as well"
        )
    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None, streaming=not is_offline_mode())
    except (ConnectionError, FileNotFoundError) as error:
        state = "HF_HUB_OFFLINE is set and it is not in the cache" if is_offline_mode() else str(error)
        raise ClearheadError(
            f"dataset {path!r} cannot be read: {state}. Check the name on huggingface.co/datasets and the network; "
            f"--text default, a folder or a file need neither"
        ) from error
    except ValueError as error:
        # datasets raises it for a configuration that is missing or unknown, and lists those there are
        raise ClearheadError(f"dataset {path!r}: {error} Name one as {path}:CONFIGURATION") from error
    if "train" not in splits:
        raise ClearheadError(
            f"dataset {name!r} has the splits {', '.join(map(str, splits))}; expected one named 'train'"
        )
    apart = next((other for other in ("validation", "test") if other in splits), None)
    rows = splits["train"] if split == "train" or apart is None else splits[apart]
    return _documents(name, rows, None if apart is not None else split)


def _documents(
    name: str, rows: datasets.IterableDataset | datasets.Dataset, kept_side: Split | None
) -> Iterator[Document]:
    for number, row in enumerate(rows):
        text = row.get(FIELD)
        if not isinstance(text, str):
            raise ClearheadError(
                f"row {number} of dataset {name!r} has the columns {', '.join(row)}; expected a string in {FIELD!r}"
            )
        side = "held_out" if stable_hash(text) % HELD_OUT_ONE_IN == 0 else "train"
        if text.strip() and kept_side in (None, side):
            yield Document(f"{os.path.basename(name)}:{number}", text)
