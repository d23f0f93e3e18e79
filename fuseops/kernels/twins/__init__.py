"""The plain torch twin of every kernel, one module a noun: readable spec, CPU backend, fake-shape
and test oracle.
"""
