"""What a step does, seen from outside: which module runs, what it saves, on which kernels, in how many bytes.

which module    modules (a stack of those that run), observer (every Sequential's calls)
what is saved   saved (a ledger of a forward), labels (the name of each saved tensor)
kernels         gemms (what each grouped GEMM runs on)
trial runs      fakes, rehearse (the peak of a step), memory (bytes after each op), untouched (the model afterwards),
                travel (what would go between ranks)
"""
