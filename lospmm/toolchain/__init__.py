"""Compilers of kernels, each run as a process, and cubins."""
