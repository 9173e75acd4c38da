"""llm_comm in inference engines. Each module here is loaded by one engine, through its plugin entry point."""
