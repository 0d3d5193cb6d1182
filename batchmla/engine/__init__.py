"""From prompts of token ids to completions of token ids; knows no text and no files."""
