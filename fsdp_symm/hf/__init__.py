"""Hugging Face transformers: its experts' tokens over this package's exchanges.

```python
import fsdp_symm.hf

fsdp_symm.hf.register()
config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="copy_engine")
model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)
...
fsdp_symm.experts.ep_finalize()  # before destroy_process_group()
```
"""

from fsdp_symm.hf.registration import register

__all__ = ["register"]
