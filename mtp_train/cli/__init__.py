"""Floor 5: one file per stage; the only users of Hydra. Stages find each other's outputs in the run folder."""

import logging

# Before transformers is imported, which imports torchao where it is installed.
logging.getLogger("torchao").setLevel(logging.ERROR)  # tells of kernels for other machines
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # tells torchao's makers of calls
