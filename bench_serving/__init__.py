"""End-to-end A/B of decode latency in real vLLM and SGLang: ``python -m bench_serving --help``."""
