"""``llm-comm bench`` and ``llm-comm tune``: measurements of collectives on this machine."""
