"""Memory that lies elsewhere: in a file, or in pinned memory of the host.

What the native part moves has its stores in csrc/store.
"""
