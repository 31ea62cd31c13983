"""The P-EAGLE layout: an `eagle3` folder with what a head needs to draft all tokens in one forward.

    rows   text's:       embed_tokens[x[p+1]], fc([g1 | g2 | g3])
           after them:   embed_tokens[ptd_token_id], fc(mask_hidden)      k - 1 of them, causal like the others
    logits lm_head(norm(out)) of the text's last row and of each after it: k drafts

(vLLM 0.32 `llama_eagle3.py` with `parallel_drafting`: `mask_hidden` goes through the norms before fc as states do.) The
mask token is `ptd_token_id`, which vLLM also calls `pard_token`, speculators `mask_token_id`. `embed_tokens` is the
head's own. `num_depths`, which engines pass over, says how many drafts were trained.

Knows tensors and config keys only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.eagle3 import MASK, NEEDS, Eagle3, Equation
from mtp_train.export.layout import Chain, Serving
from mtp_train.export.speculators import KIND, flat
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle3 import STATES
from mtp_train.heads.peagle import PEagleConfig, PEagleHead
from mtp_train.models.target import Target

EMBEDDING = "embed_tokens.weight"
TOKEN = "ptd_token_id"
TOKENS = (TOKEN, "pard_token", "mask_token_id")
DEPTHS = "num_depths"


class PEagle(Eagle3):
    """`peagle`."""

    name = "peagle"
    family = PEagleHead.family
    needs = (MASK, *NEEDS)
    never = ()
    made = (PEagleConfig, PEagleHead)

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        found = super().tensors(head, target, dtype)
        return found | {MASK: found[MASK].view(1, 1, -1)}

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        mask, depths = head.config.mask_token, head.config.depths
        return super().config(head, target) | {TOKEN: mask, DEPTHS: depths}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return any(token in config for token in TOKENS)

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> PEagleHead:
        flattened = {MASK: tensors[MASK].reshape(-1)} if MASK in tensors else {}
        head = super().read({**tensors, **flattened}, _plain(config), target)
        assert isinstance(head, PEagleHead)
        return head

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        said = [config[token] for token in TOKENS if config.get(token) is not None]
        if not said or not 0 <= said[0] < config["vocab_size"]:
            raise UserError(
                f"a peagle head's config.json must name its mask token as {TOKEN}",
                said[0] if said else "none",
                "write it there",
            )
        return {"mask_token": said[0], "depths": config.get(DEPTHS, PEagleConfig.depths)}

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        equation, masks = Equation(tensors, config, self.prefix), chain.steps - 1
        unknown = equation.fused(list(tensors[MASK].view(1, -1).chunk(STATES, dim=-1)))
        state = torch.cat([equation.fused_states(chain), unknown.expand(masks, -1)])
        read_N = torch.full((chain.rows + masks,), config[TOKEN])
        read_N[: chain.rows] = chain.token_N[1 : chain.rows + 1]
        read_ND, _ = equation.step(tensors[EMBEDDING][read_N], state, chain.position())
        return list(equation.lm_head(read_ND[-chain.steps :]))

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        count = min(drafts, config.depths)
        how = llama.vllm("eagle3", target, head, count, parallel=True)
        return [
            Serving("vLLM, method `eagle3`, `parallel_drafting`", "0.32.0, CPU build", True, how),
            Serving("SGLang", "mid 2026", False, "Its EAGLE-3 model knows no `mask_hidden`."),
        ]

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        found = {name.removeprefix("model."): value for name, value in tensors.items()}
        theirs = target.base.get_input_embeddings().weight.detach().cpu()
        embedding = found.pop(EMBEDDING, theirs)  # without one engines take the target's
        return super().tidied(found, target) | {EMBEDDING: embedding}

    def names(self, head: DraftHead) -> dict[str, str]:
        return super().names(head) | {MASK: MASK, EMBEDDING: EMBEDDING}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of another trainer's with its keys where EAGLE-3 has them."""
    if KIND not in config:
        return dict(config)
    beside = {key: config[key] for key in (*TOKENS, DEPTHS) if key in config}
    return flat({"norm_before_residual": False, **config}) | beside
