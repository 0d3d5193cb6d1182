"""No reasoning: all that the model writes is content."""

from batchmla.text.formats.format import Format

FORMAT = Format(name="none", start=None, end=None)
