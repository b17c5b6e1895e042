"""Auto-tuned, fully unrolled SpMM kernels for pruned neural networks, after the paper LO-SpMM (TACO 2024)."""

__version__ = "0.1.0"
