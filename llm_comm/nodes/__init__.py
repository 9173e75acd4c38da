"""Groups whose ranks are on several nodes: hierarchical collectives (docs/nodes.md)."""
