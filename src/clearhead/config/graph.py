"""The verbs that work on saved graphs: side by side, several as one, and in other programs' formats."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from clearhead.config.verb import Verb
from clearhead.errors import ClearheadError

GraphFormat = Literal["neuronpedia", "graphml", "mib", "bundle"]


@dataclass(frozen=True, kw_only=True)
class GraphDiff(Verb):
    """Lay two saved graphs side by side: what only one has, and how much carries each."""

    verb: ClassVar[str] = "graph diff"

    first: Positional[Path]
    """Folder of a graph, its graph.json as one file, or the JSON of a circuit of heads and MLPs (EAP-IG, MIB)."""
    second: Positional[Path]
    """Another one."""
    from_end: bool = False
    """Count token positions from the end of each prompt, for prompts of different length."""
    top: int = 10
    """Units, edges and heads that are listed, at most, of each kind."""
    out: Path | None = None
    """Folder for the difference, first minus second, as a graph. Derived: none is written."""

    def validate(self) -> None:
        """Something is listed."""
        self._positive("top")


@dataclass(frozen=True, kw_only=True)
class GraphMerge(Verb):
    """Make one graph of several, such as of many prompts: edges have their mean weight."""

    verb: ClassVar[str] = "graph merge"

    graphs: Positional[tuple[Path, ...]] = ()
    """Folders of graphs, two at least."""
    from_end: bool = False
    """Count token positions from the end of each prompt, for prompts of different length."""
    out: Path = Path("merged")
    """Folder of the merged graph."""

    def validate(self) -> None:
        """There is something to merge."""
        if len(self.graphs) < 2:
            raise ClearheadError("give the folders of two graphs at least, as in: clearhead graph merge A B --out C")


@dataclass(frozen=True, kw_only=True)
class GraphExport(Verb):
    """Write a saved graph in the format of another program."""

    verb: ClassVar[str] = "graph export"

    graph: Positional[Path]
    """Folder of a graph, its graph.json as one file, or the JSON of a circuit of heads and MLPs (EAP-IG, MIB)."""
    format: GraphFormat = "neuronpedia"
    """Neuronpedia and circuit-tracer, GraphML, circuits of heads and MLPs as EAP-IG and MIB write them, or ours."""
    slug: str | None = None
    """Name of the graph on Neuronpedia, of letters, digits, '_', '.' and '-'. Derived: the folder's name."""
    scan: str | None = None
    """Name of the model on Neuronpedia, such as gemma-2-2b. Derived: the model's name."""
    source_set: str | None = None
    """Source set on Neuronpedia that holds the transcoder features' dashboards."""
    lorsa_source_set: str | None = None
    """Source set on Neuronpedia that holds the Lorsa heads' dashboards."""
    features_url: str | None = None
    """Address of the folder of feature files, where dashboards are not on Neuronpedia."""
    out: Path | None = None
    """File or folder to write. Derived: beside the graph, named after it and the format."""

    def validate(self) -> None:
        """Names of dashboards belong to Neuronpedia."""
        if self.format != "neuronpedia":
            options = ("slug", "scan", "source-set", "lorsa-source-set", "features-url")
            self._meaningless(options, f"only --format neuronpedia has it, not {self.format}")
        both = self.source_set is not None and self.features_url is not None
        self._refuse(both, "features-url", "features come from one place; leave out this or --source-set")
