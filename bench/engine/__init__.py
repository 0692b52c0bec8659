"""Benchmark of the engine against its neighbours: ``python -m bench.engine``."""
