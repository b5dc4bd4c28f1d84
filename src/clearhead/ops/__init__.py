"""Numerics: a float64 reference for each operation, fast backends with the same signature, chosen in dispatch.py."""
