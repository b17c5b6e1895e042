"""The ``lospmm`` command."""
