"""Import for the server that forks, and leave what that makes out of later garbage collections."""

import gc
from importlib import import_module

gc.disable()
for module in ("pytest", "rlhf_lightning.app.train", "tests.builders.stages"):
    import_module(module)
gc.collect()
gc.freeze()
gc.enable()
