"""Lanes, which run copies, and the host memory for them: one protocol for CUDA streams, the CPU and a simulated clock.

protocol   the interface, events and buffers; real (base of cpu and cuda), devices (the lanes of a device)
simulated  lanes on a simulated clock, which check the order of accesses
arena      host memory
"""
