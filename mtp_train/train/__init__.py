"""Floor 4: fit a head to features. accelerate and deepspeed are named only here and in core/dist."""
