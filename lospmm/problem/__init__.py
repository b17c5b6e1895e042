"""The problem: C = A x B on one GPU, in a type, with a convolution and an epilogue."""
