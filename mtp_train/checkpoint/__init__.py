"""Floor 3: heads on disk, bound to their target. Only safetensors and JSON; knows no trainer and no engine."""
