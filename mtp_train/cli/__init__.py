"""Floor 5: one file per stage; the only users of Hydra. Stages find each other's outputs in the run folder."""
