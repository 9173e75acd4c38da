"""End-to-end A/B comparison of decode latency in vLLM and SGLang: ``python -m bench_serving --help``."""
