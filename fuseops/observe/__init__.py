"""Observers of a step: which module runs, what it saves, on which kernels, in how many bytes.

which module    modules (the stack of running modules), observer (the calls of Sequentials)
what is saved   saved (a ledger of a forward), labels (the name of each saved tensor)
kernels         gemms (what each grouped GEMM runs on)
trial runs      fakes, rehearse (the peak of a step), memory (each op, and bytes after it), travel (transfers between
                ranks), untouched (restores the model), held (what its modules hold, and random states)
"""
