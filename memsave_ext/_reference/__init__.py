"""Adam in pure Python: the fallback without the native part, and the oracle in its tests.

Same arguments, results and errors as csrc/adam; only slower.
"""
