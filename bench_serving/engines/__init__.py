"""Code that runs in the engine's process: one module for each engine, ``python -m bench_serving.engines.vllm JOB``."""
