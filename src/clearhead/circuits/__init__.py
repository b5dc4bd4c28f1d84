"""Which heads, units and edges cause a behaviour, and why each head looks where it looks."""
