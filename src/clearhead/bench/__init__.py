"""Benchmarks of speed and quality, ours beside others', each a function that prints a table and writes a report."""
