"""llm_comm in vLLM; the entry point names ``register`` here."""

from llm_comm.integrations.vllm.plugin import register

__all__ = ["register"]
