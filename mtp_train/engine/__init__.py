"""Floor 3: the draft/target engine: pages, scheduler, propose / verify / commit. Knows no text, no training."""
