"""Text to token blocks to activations, in an order that a seed and a step determine."""
