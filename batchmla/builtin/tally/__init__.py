"""The small DeepSeek-V3-class model shipped with batchmla; `model.path: builtin:tally` names this folder."""
