"""Floor 4: checkpoints to serving folders and back. A format's tensor list is enforced in both directions."""
