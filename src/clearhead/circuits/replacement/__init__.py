"""The model with dictionaries in the place of its attention and MLPs: what that costs, and the circuit of the whole."""
