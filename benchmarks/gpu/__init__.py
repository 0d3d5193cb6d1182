"""The pieces of `gpu_check.sh`: each is run by itself, in a process of its own."""
