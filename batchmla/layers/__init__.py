"""Building blocks that take a Par and an Ops and know no family."""
