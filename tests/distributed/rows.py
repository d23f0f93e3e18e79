"""Which law shows which cell of the parallelism table in docs/compatibility.md."""

from __future__ import annotations

COLUMNS = (
    "TP=2",
    "TP=2, sequence parallel",
    "1F1B",
    "interleaved 1F1B",
    "zero bubble",
    "ZBV",
    "DualPipeV",
)

EXPERTS = ("tensor_ranks", "law_experts")
FEATURES = "law_features_of_one_process_hold_over_local_tensors"
PIPES = {
    "1F1B": ("schedule_laws", "law_1f1b"),
    "interleaved 1F1B": ("schedule_laws", "law_interleaved"),
    "zero bubble": ("schedule_laws", "law_zero_bubble"),
    "ZBV": ("schedule_laws", "law_zbv"),
    "DualPipeV": ("schedule_laws", "law_dualpipev"),
}
DELAYED = {
    "zero bubble": ("schedule_laws", "law_zero_bubble_with_a_dw_builder"),
    "ZBV": ("schedule_laws", "law_zbv_with_a_dw_builder"),
    "DualPipeV": ("schedule_laws", "law_dualpipev_with_a_dw_builder"),
}


def both(law: str) -> dict[str, tuple[str, str]]:
    """One law of tensor parallelism, with and without sequence parallelism."""
    return dict.fromkeys(COLUMNS[:2], ("tensor_ranks", law))


# what is combined with each way to spread a model -> the law that compares it with one process
ROWS: dict[str, dict[str, tuple[str, str]]] = {
    "dense MLPs, norms, biases": {**both("law_mlps"), **PIPES},
    "experts (`fo.MoE`), router losses": {"TP=2": EXPERTS, **PIPES},
    "offload, with marks and inner scopes": {**both("law_recomputation_and_offload"), **PIPES},
    "checkpoint": {
        **both("law_recomputation_and_offload"),
        **dict.fromkeys(COLUMNS[2:], ("schedule_laws", "law_checkpoints_in_stages")),
    },
    "delayed weight gradients": {
        **both("law_delayed_weight_gradients"),
        **DELAYED,
    },
    "accumulation, frozen weights, copies": both(FEATURES),
    "`torch.compile`": both(FEATURES),
    "autocast, `Float8BlockScaling`": {
        **both(FEATURES),
        **dict.fromkeys(COLUMNS[2:], ("schedule_laws", "law_autocast_and_recipes_in_stages")),
    },
    "collectives overlapped with products": {
        COLUMNS[1]: ("tensor_ranks", "law_collectives_beside_products_run_as_one")
    },
    "FSDP2": {
        "TP=2": ("tensor_ranks", "law_fully_sharded_beside_it"),
        **dict.fromkeys(
            COLUMNS[3:], ("schedule_laws", "law_stages_under_fsdp2_are_reduced_by_the_schedule")
        ),
    },
    "experts over two ranks, pairs in turns": {
        "DualPipeV": ("pair_laws", "law_pairs_over_ranks_equal_those_one_after_the_other")
    },
    "AdamW with clipping, distributed checkpoints": {
        "TP=2": ("tensor_ranks", "law_steps_and_checkpoints")
    },
}


def text() -> str:
    """The section of the page."""
    head = "| | " + " | ".join(COLUMNS) + " |"
    lines = [
        f"| {name} | " + " | ".join("equal" if c in cells else "" for c in COLUMNS) + " |"
        for name, cells in ROWS.items()
    ]
    return f"{HEAD}\n{head}\n|---|{'---|' * len(COLUMNS)}\n" + "\n".join(lines) + "\n"


HEAD = """## Tensor parallelism and pipelines

Outputs and every gradient on two ranks, over gloo, beside one process in float64. `tests/distributed` has the test of
each cell; an empty cell has none.

- Pipelines are equal to the bit, under autocast and FP8 too.
- Tensor parallelism is equal within rounding; autocast and FP8, which round, within 2 %, gradients within 5 %.
- Collectives overlapped with products run on stand-ins of torch's CUDA ops.
- Experts under sequence parallelism are refused, since the router takes every token.
- Only zero-bubble schedules delay weight gradients.
"""
