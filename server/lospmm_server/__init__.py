"""The REST service: a pruned matrix comes in, a kernel goes out (docs/rest.md)."""
