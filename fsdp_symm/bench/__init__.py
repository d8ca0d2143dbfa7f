"""Benchmarks: each checks its result before it times it, and writes one CSV schema (:mod:`fsdp_symm.bench.schema`)."""
