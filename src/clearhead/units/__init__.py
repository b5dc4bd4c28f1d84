"""What every lens produces and every page shows: units and graphs of units."""

from clearhead.units.annotations import AttentionTable, Loadings, Supernode
from clearhead.units.graph import Graph
from clearhead.units.provenance import Provenance
from clearhead.units.unit import KINDS, Unit

__all__ = ["KINDS", "AttentionTable", "Graph", "Loadings", "Provenance", "Supernode", "Unit"]
