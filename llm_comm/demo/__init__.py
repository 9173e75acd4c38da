"""Command ``llm-comm demo``: tensor-parallel decode of a small Llama through :class:`llm_comm.Communicator`."""
