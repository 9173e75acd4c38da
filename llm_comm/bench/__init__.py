"""Commands ``llm-comm bench`` and ``llm-comm tune``: measurements of collectives on this machine."""

#: Timing methods (``timing``). The methods of ALIGNED_METHODS start the ranks together on the GPU.
ALIGNED_METHODS = ("aligned", "spaced")
METHODS = (*ALIGNED_METHODS, "plain")

#: Image formats of ``--plot``.
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

#: Token counts at which ``tune`` times linear layers. Kernels exist for 8, 16, 32 and 64; below 8 they read less of x.
LAYER_TOKENS = (1, 4, 8, 16, 32, 64)

#: Operations of ``tune`` and ``bench table``.
OPERATIONS = ("all-reduce", "fused", "all-gather", "reduce-scatter", "all-to-all")
