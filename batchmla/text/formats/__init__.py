"""One file per chat format: reasoning markers and tool-call syntax."""
