"""Follows memory in pure Python where there is no native part; its files are those of csrc/memory.

The events are those of torch's profiler, which are read when the block is left: until then a
tracker does not know its figures. It sees no other threads. The rules are the same as in C++.
"""
