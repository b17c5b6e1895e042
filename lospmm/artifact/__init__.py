"""A tuned kernel's folder: cubin, source, matrix, log and manifest."""
