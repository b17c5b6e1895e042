"""The REST service: clients post a pruned matrix and get a kernel (docs/rest.md)."""
