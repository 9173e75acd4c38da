"""``llm-comm bench`` and ``llm-comm tune``: measurements of collectives on this machine."""

#: How a call is timed (``timing``): with ranks that start together on the GPU, and in all.
ALIGNED_METHODS = ("aligned", "spaced")
METHODS = (*ALIGNED_METHODS, "plain")

#: What ``--plot`` can write.
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

#: Of linear layers that ``tune`` times: there are kernels for 8, 16, 32 and 64, and up to 8 less is read of x.
LAYER_TOKENS = (1, 4, 8, 16, 32, 64)

#: Whose candidates ``tune`` and ``bench table`` time.
OPERATIONS = ("all-reduce", "fused", "all-gather", "reduce-scatter")
