"""The problem: C = A x B on one GPU, in a data type, with an optional convolution and epilogue."""
