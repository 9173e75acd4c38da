"""Command ``llm-comm``: parser, launcher of ranks, and the commands that need no ranks."""
