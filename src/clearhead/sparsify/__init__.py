"""Sparse post-training: a pretrained model is trained to attend through few edges, and what it became is measured."""
