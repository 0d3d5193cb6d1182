"""One attention flavour, one file: its cache parts, its plan, its module."""
