"""``llm-comm bench`` and ``llm-comm tune``: measurements of collectives on this machine."""

#: How a call is timed (``timing``). Here, so that the command line can be parsed without torch.
METHODS = ("aligned", "spaced", "plain")
