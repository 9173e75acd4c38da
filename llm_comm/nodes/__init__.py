"""Hierarchical collectives for groups whose ranks are on several nodes (docs/nodes.md)."""
