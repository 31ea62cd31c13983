"""Floor 1: features on disk. Shards of packed rows in safetensors, a manifest written last. Knows no model."""
