r"""Embedding-space probing (ESP): several tokens per pass of a frozen model, with no draft model and no training.

Behind the token written last go k soft masks, vectors that are no token. Their logits rank the tokens two, three, ...
steps ahead; the best of them make a small tree, which the next pass verifies with the model's own choices while masks
behind every node already probe what comes next. Tokens are those of plain decoding, given the same keys.

A pass over a root r at position p reads

    [r | candidates, breadth first | k masks of r | k masks of candidate 1 | ...]

a candidate at position p + its depth, mask j of an owner at the owner's position + j. A row sees the cache; a candidate
its ancestors and itself; a mask what its owner sees, the owner's masks before it, and itself. Only the rows of the
accepted path are appended to the cache.

Products of many rows may round otherwise than those of one. In bfloat16 that decides near-ties: `ESPConfig.strict`
decides those as plain decoding does, and `ESPStats` counts them. Mixtures of experts gain little, since the rows of a
tree ask for many experts.

Source: Goel, Gagrani, Lee, Lott 2026, arXiv:2603.17942.

    >>> ESPConfig(num_masks=1, widths=(4,)).rows
    10
"""

from __future__ import annotations

from effml.decode.esp._config import ESPConfig
from effml.decode.esp._drafters import Drafter, ESPDrafter, Extra, Prompt, Seen, Text
from effml.decode.esp._generate import (
    ESPGeneration,
    ESPStats,
    ESPStream,
    generate,
    stream,
    stream_text,
)
from effml.decode.esp._masks import init_masks, update_masks, vocabulary_statistics
from effml.decode.esp._peers import CountDrafter, Lookahead, NgramCache, PromptLookup, count_candidates
from effml.decode.esp._probe import AlignmentProbe, alignment_probe, hit_rates, probe_logits, probe_masks
from effml.decode.esp._step import Rules, State, esp_step, prefill, write
from effml.decode.esp._tree import Tree, TreeSpec, dynamic_tree, fill_tree, ranked, tree_structure
from effml.decode.esp._verify import Choice, Path, choose, choose_by_rejection, verify

__all__ = [
    "AlignmentProbe",
    "Choice",
    "CountDrafter",
    "Drafter",
    "ESPConfig",
    "ESPDrafter",
    "ESPGeneration",
    "ESPStats",
    "ESPStream",
    "Extra",
    "Lookahead",
    "NgramCache",
    "Path",
    "Prompt",
    "PromptLookup",
    "Rules",
    "Seen",
    "State",
    "Text",
    "Tree",
    "TreeSpec",
    "alignment_probe",
    "choose",
    "choose_by_rejection",
    "count_candidates",
    "dynamic_tree",
    "esp_step",
    "fill_tree",
    "generate",
    "hit_rates",
    "init_masks",
    "prefill",
    "probe_logits",
    "probe_masks",
    "ranked",
    "stream",
    "stream_text",
    "tree_structure",
    "update_masks",
    "verify",
    "vocabulary_statistics",
    "write",
]
