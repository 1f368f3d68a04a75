"""Checkpointing in pure Python, used where there is no native part; files as in csrc/checkpoint.

Arguments, results and errors are the same; it is slower. One thing differs, because torch offers
Python less: unlisted tensors are looked for only in a backward on the forward's own thread, and the
graph is not cut at them.
"""
