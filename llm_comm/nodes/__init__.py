"""Groups whose ranks are on several nodes: hierarchical collectives (docs/operate/nodes.md)."""
