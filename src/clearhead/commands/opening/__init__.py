"""What verbs open before they measure: finished runs, saved graphs, the structure of a model."""
