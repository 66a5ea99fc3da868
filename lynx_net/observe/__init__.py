"""Seeing what links do: timelines as Chrome traces, and metrics for Prometheus.

Both are observers: `lynx_net.connect(url, observers=[TraceRecorder(), Metrics()])`, the same with `serve`.
"""

from lynx_net.observe.metrics import Metrics
from lynx_net.observe.trace import TraceRecorder

__all__ = ["Metrics", "TraceRecorder"]
