"""Floor 4: the target answers prompts through the engine: on-policy data. Knows no features and no training."""
