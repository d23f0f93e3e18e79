"""One of two ranks under accelerate: a step of a model after `hf.apply`, beside the stock model's."""

import torch
from accelerate import Accelerator
from families import agree, step, stock, tokens

from fuseops.integrations import hf


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    batches = [tokens(), tokens()]
    model = stock("Qwen3-MoE").train()
    hf.apply(model)
    wrapped = accelerator.prepare(model)
    x = batches[accelerator.process_index]
    accelerator.backward(wrapped(input_ids=x, labels=x).loss)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    both = [step(stock("Qwen3-MoE").train(), batch) for batch in batches]
    agree(found, {n: (both[0][n] + both[1][n]) / 2 for n in found})
    print("equal", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
