"""The nodes that the site declares, from the node sets of the config."""

from __future__ import annotations

import msgspec
from ClusterShell.NodeSet import NodeSet, NodeSetException

from ..config import Config
from ..units import watts_to_mw
from .budget import forgotten
from .state import NodeView, State


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


def cannot_leave(state: State, declared: dict[str, NodeView], config: Config, now_ns: int) -> str:
    """Why a new config must wait: it would lift caps in a window, or leave a node with caps that nobody ends.

    Empty if it may come into force. ``config`` is the one in force. A node that counts at its worst already may be
    given up in a window too: it is most likely off, and what it does should it come back has its place in the budget.
    """
    for name, node in state.nodes.items():
        new = declared.get(name)
        if new is None and node.mode == "enforce" and _may_be_capped(node):
            return f"node {name} may still hold caps of ours: set it to mode = 'observe' first, and take it out after"
        given_up = node.report is None or forgotten(node, config, now_ns)
        to_observe = new is not None and (node.mode, new.mode) == ("enforce", "observe")
        if to_observe and state.window is not None and not given_up:
            return (
                f"mode = 'observe' would lift the caps of node {name} inside a window:"
                " wait for its end, or say 'slurm-pfi off'"
            )
    return ""


def with_nodes(state: State, declared: dict[str, NodeView]) -> State:
    """The declared nodes with what is known of those that stay, and the runs on them."""
    nodes = {}
    for name, node in declared.items():
        old = state.nodes.get(name)
        nodes[name] = node
        if old is not None:
            nodes[name] = msgspec.structs.replace(
                old, gpus=node.gpus, gpu_max_mw=node.gpu_max_mw, overhead_mw=node.overhead_mw, mode=node.mode
            )
    runs = {}
    for run, view in state.runs.items():
        gpus = {name: uuids for name, uuids in view.gpus.items() if name in nodes}
        if gpus:
            runs[run] = view if gpus == view.gpus else msgspec.structs.replace(view, gpus=gpus)
    return msgspec.structs.replace(state, nodes=nodes, runs=runs, strangers=frozenset())


def _may_be_capped(node: NodeView) -> bool:
    """Whether a plan that caps may be in force on it, now or later, or a limit of ours stands there."""
    planned = any(step.park_cap_mw is not None for sent in node.outstanding for step in sent.plan.steps)
    gpus = node.report.gpus if node.report is not None else ()
    return planned or any(
        gpu.prior_mw is not None and gpu.ceiling_mw is not None and gpu.ceiling_mw < gpu.prior_mw
        for gpu in gpus
    )
