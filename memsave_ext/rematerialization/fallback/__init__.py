"""Rematerialization in pure Python, used where there is no native part: csrc/remat, file by file.

A dispatch mode is shown the operators below autograd, one at a time. The same decisions, gradients
and errors; only slower.
"""
