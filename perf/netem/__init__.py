"""Small networks of Linux namespaces with a rate, a delay and loss; see docs/netem.md."""

from perf.netem.errors import NetemError
from perf.netem.network import Host, Network, enter, network, two_hosts
from perf.netem.shaping import Shape

__all__ = ["Host", "NetemError", "Network", "Shape", "enter", "network", "two_hosts"]
