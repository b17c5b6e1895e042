"""A client of the REST service."""

from lospmm.client.client import Client

__all__ = ["Client"]
