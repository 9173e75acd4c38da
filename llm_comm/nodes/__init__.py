"""Hierarchical collectives for groups whose ranks are on several nodes (docs/operate/nodes.md)."""
