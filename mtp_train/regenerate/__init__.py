"""Floor 4: the target answers prompts, by the engine or a server: on-policy data. Knows no features, no training."""
