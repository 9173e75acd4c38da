"""llm_comm in SGLang; the entry point names ``register`` here."""

from llm_comm.integrations.sglang.plugin import register

__all__ = ["register"]
