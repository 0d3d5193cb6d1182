"""The specification of every op: plain torch, float32 inside, loops allowed; no run uses it."""
