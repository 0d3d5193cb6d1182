"""The small DeepSeek-V3-class model of this package: `model.path: builtin:tally` names it."""
