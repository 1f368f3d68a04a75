"""The pure-Python path: the fallback without the native part, and the oracle in its tests.

Same arguments, results and errors as csrc, room by room; only slower. Where torch offers Python
less than C++: the look for unlisted tensors happens only in a backward on the forward's own thread,
edges to them are not cut, and an allocation tracker knows its figures when its block has ended.
"""
