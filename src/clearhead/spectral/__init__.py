"""The spectral lens: singular vectors of query-key products, and what they say about where heads look."""
