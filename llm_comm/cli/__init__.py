"""The ``llm-comm`` command: parser, what starts ranks, and commands that need none."""
