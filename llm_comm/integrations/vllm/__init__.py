"""Integration of llm_comm into vLLM. The plugin's entry point is ``register``."""

from llm_comm.integrations.vllm.plugin import register

__all__ = ["register"]
