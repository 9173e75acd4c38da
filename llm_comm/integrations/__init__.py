"""Integrations of llm_comm into inference engines. Each engine loads its subpackage through a plugin entry point; the
modules of this package are shared."""
