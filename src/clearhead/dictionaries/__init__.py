"""Modules that imitate a component of the model, their initial weights, and their form on disk."""
