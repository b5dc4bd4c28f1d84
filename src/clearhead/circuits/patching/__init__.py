"""Runs of a model in which chosen activations are overwritten, and what that does to the answer."""
