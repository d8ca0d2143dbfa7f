"""torchtitan 0.3 with the switch on: TOML over its config objects, a trainer, TensorBoard scalars, traces.

Nothing is imported here: ``fsdp_symm.titan.config.load`` and ``fsdp_symm.titan.run.main`` are the two doors, and
only they import torchtitan (seconds), after ``fsdp_symm.titan.cpu`` has prepared a machine without a GPU.
"""
