"""Batches over the layers of a model, and their report."""
