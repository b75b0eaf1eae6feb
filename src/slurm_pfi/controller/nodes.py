"""The nodes that the site declares, from the node sets of the config."""

from __future__ import annotations

from ClusterShell.NodeSet import NodeSet, NodeSetException

from ..config import Config
from ..units import watts_to_mw
from .state import NodeView


class ConfigNodesError(ValueError):
    """The node sets contradict each other or cannot be read."""


def declared_nodes(config: Config) -> dict[str, NodeView]:
    """Every node by name. Raises ConfigNodesError for a bad name pattern or a node named twice."""
    nodes: dict[str, NodeView] = {}
    for place, node_set in enumerate(config.node_set, start=1):
        try:
            names = list(NodeSet(node_set.names))
        except NodeSetException as error:
            raise ConfigNodesError(f"node_set {place}: names = {node_set.names!r}: {error}") from error
        if not names:
            raise ConfigNodesError(f"node_set {place}: names = {node_set.names!r} names no node")
        for name in names:
            if name in nodes:
                raise ConfigNodesError(f"node_set {place}: node {name} is named twice")
            nodes[name] = NodeView(
                name=name,
                gpus=node_set.gpus,
                gpu_max_mw=watts_to_mw(node_set.gpu_max_w),
                overhead_mw=watts_to_mw(node_set.overhead_w),
                mode=node_set.mode or config.mode,
            )
    return nodes
