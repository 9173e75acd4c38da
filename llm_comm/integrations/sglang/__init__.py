"""Integration of llm_comm into SGLang. The plugin's entry point is ``register``."""

from llm_comm.integrations.sglang.plugin import register

__all__ = ["register"]
