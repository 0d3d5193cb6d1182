"""MiniMax-M3: reasoning between tags of its own name space; calls are left as the model writes
them."""

from batchmla.text.formats.format import Format

FORMAT = Format(name="minimax_m3", start="<mm:think>", end="</mm:think>", arguments="object")
