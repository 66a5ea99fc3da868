"""Python's collector in a process that has loaded a model."""

from __future__ import annotations

import gc

__all__ = ["freeze_loaded"]


def freeze_loaded() -> None:
    """What is loaded stays: the collector need not look at it again, which holds transfers up (docs/operations.md).

    For a process that is the caller's own. Blocks for one pass of the collector.
    """
    gc.collect()
    gc.freeze()
