"""Floor 1: the attention of one forward, in two contexts.

Every target and head runs transformers' own model code; its attention calls land here, in the context
that the caller passed to the forward: `packed` for training and feature capture, `paged` for inference.
Knows no model, no head and no engine.
"""
