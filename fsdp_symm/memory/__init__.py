"""Where symmetric bytes come from: arenas, their providers, and the mixin that answers FSDP2's ``allocate``."""
