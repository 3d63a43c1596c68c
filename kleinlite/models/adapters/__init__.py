"""Adapter files: the `names` in them, what a `file` holds, what that computes (`variants`), and how one is written."""

from .file import Adapter, bundled_adapters, describe_adapter, find_adapter, open_adapter
from .write import write_adapter

__all__ = ["Adapter", "bundled_adapters", "describe_adapter", "find_adapter", "open_adapter", "write_adapter"]
