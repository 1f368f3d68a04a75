"""Checkpointing in pure Python, used where there is no native part: csrc/checkpoint, file by file.

Same arguments, results and errors; only slower. Where torch offers Python less than C++: the look
for unlisted tensors happens only in a backward on the forward's own thread, and edges to them are
not cut.
"""
