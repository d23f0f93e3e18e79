"""Triton code, one module a noun. The only modules of fuseops that import Triton;
``launch.device`` loads them.
"""
