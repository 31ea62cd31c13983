"""Floor 4: the target's states of given text into a feature store, behind the gate. Knows no head and no training."""
