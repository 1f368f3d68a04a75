"""Following memory in pure Python, used where there is no native part: csrc/memory, file by file.

The events are those of torch's profiler, read when the block is left: until then a tracker does not
know its figures, and it sees no other threads. The rules are the same.
"""
