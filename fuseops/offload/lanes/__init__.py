"""What copies bytes, and host memory for them: one protocol, spoken by CUDA streams, bytes on the CPU and a simulated
clock.
"""
