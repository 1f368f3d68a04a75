"""Rematerialization in pure Python, used without the native part; its files mirror csrc/remat.

A dispatch mode sees the operators below autograd, one at a time. Decisions, gradients and errors
are the same as the native part's; it is only slower.
"""
