"""Kernels in plain C for the CPU: sources, their build into the user's cache, and their check before first use."""
