"""Pruned matrices in CSR, and the files that they are read from."""
