"""What every lens produces and every page shows: units and graphs of units."""

from clearhead.units.graph import Graph, Provenance
from clearhead.units.unit import KINDS, Unit

__all__ = ["KINDS", "Graph", "Provenance", "Unit"]
