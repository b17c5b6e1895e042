"""Synthetic matrices, pruning patterns, and the layer shapes of the paper."""
