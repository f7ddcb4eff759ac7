"""The sections of the table of headlines that are of one layer or one set-up."""

from typing import Any

from planner.planfile.budget import format_bytes

Result = dict[str, Any]


def formula_rows(results: dict[str, Result]) -> list[str]:
    """Activations of a transformer layer beside the published formula."""
    rows = [
        "## Activations of a transformer layer",
        "",
        "Korthikanti et al. (2022), equation 1: with 16-bit numbers a layer leaves sbh(34 + 5as/h) bytes for",
        "its backward. Captured for an A100 in bfloat16: products, softmax and dropout, and flash attention,",
        "which leaves sbh(34 + 4a/h): no (a, s, s) tensors, and a float of each row. What is more than the",
        "formula are mean and deviation of the two normalisations, 16sb.",
        "",
        "| s | b | h | a | attention | bytes / sbh | formula / sbh | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results.values():
        for row in result["rows"]:
            s, b, h, a = row["shape"]
            rows.append(
                f"| {s} | {b} | {h} | {a} | {'flash' if row['flash'] else 'explicit'} "
                f"| {row['bytes'] / (s * b * h):.3f} | {row['formula'] / (s * b * h):.3f} "
                f"| {row['bytes'] / row['formula'] - 1:+.4%} |"
            )
    return rows


def layer_rows(results: dict[str, Result]) -> list[str]:
    """Recomputation of the 22B model's layer."""
    rows = [
        "## Recomputing in the layer of 22 billion parameters",
        "",
        "Korthikanti et al., table 4: extra time of forward and backward of one layer of their 22B model on",
        "one of eight A100 that share it, without sequence parallelism, when the attention's core is",
        "recomputed (selective) and when all of the layer is (full). Here several such layers, predicted by",
        "the A100's figures, without communication: their schedule, and the planner's fastest within the",
        "same memory.",
        "",
        "| layers | recomputed | peak | paper's time | their schedule, predicted | planned | planned peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results.values():
        rows.append(f"| {result['layers']} | nothing | {format_bytes(result['peak_bytes'])} | | | | |")
        for name, way in result["ways"].items():
            rows.append(
                f"| {result['layers']} | {name} | {format_bytes(way['peak_bytes'])} "
                f"| {way['published']:+.0%} | {way['overhead']:+.1%} | {way['planned_overhead']:+.1%} "
                f"| {format_bytes(way['planned_peak_bytes'])} |"
            )
    return rows


_PARTS = (
    ("context (as published)", "context_bytes"),
    ("parameters", "parameter_bytes"),
    ("optimizer's state", "optimizer_bytes"),
    ("gradients that stay", "gradient_bytes"),
    ("forward and backward", "dynamic_bytes"),
    ("cuBLAS", "library_bytes"),
    ("reserved beyond", "fragmentation_bytes"),
)


def anatomy_rows(results: dict[str, Result]) -> list[str]:
    """Hugging Face's table of a training step, byte by byte."""
    rows = [
        "## Hugging Face's BERT-Large",
        "",
        "[Anatomy of model's training](https://huggingface.co/docs/transformers/model_memory_anatomy) and",
        "the guide that it belongs to: BERT-Large, a classifier, 512 tokens, fp32, AdamW; MiB in use by",
        "NVML. 1,343 were in use before any model (the context of that time's PyTorch), which is taken from",
        "there; batch 1 is with gradients of four steps added up. Explicit attention, as BERT had it then.",
        "Before PyTorch 2.0, gradients stayed between steps, as zeros; so both ways.",
        "",
        "| MiB | " + " | ".join(_title(row) for r in results.values() for row in r["rows"]) + " |",
    ]
    every = [row for result in results.values() for row in result["rows"]]
    rows.append("|---|" + "---|" * len(every))
    for name, key in _PARTS:
        cells = []
        for row in every:
            counted = key != "gradient_bytes" or row["gradients_stay"]
            cells.append(_mib(row[key]) if counted else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    totals = [row["reserved_bytes"] + row["context_bytes"] for row in every]
    rows.append("| **predicted** | " + " | ".join(map(_mib, totals)) + " |")
    rows.append("| **published** | " + " | ".join(_mib(row["published_bytes"]) for row in every) + " |")
    differences = [t / row["published_bytes"] - 1 for t, row in zip(totals, every, strict=True)]
    rows.append("| difference | " + " | ".join(f"{d:+.1%}" for d in differences) + " |")
    expandable = [row["expandable_reserved_bytes"] + row["context_bytes"] for row in every]
    rows.append("| with expandable segments | " + " | ".join(map(_mib, expandable)) + " |")
    missing = {
        row["batch"]: row["published_bytes"] - total
        for row, total in zip(every, totals, strict=True)
        if row["gradients_stay"]
    }
    sample = (missing[4] - missing[1]) / 3
    rows += [
        "",
        f"Where gradients stay, {_mib(missing[4])} MiB are missing at batch 4 and {_mib(missing[1])}",
        f"at batch 1: {_mib(sample)} a sample and {_mib(missing[1] - sample)} throughout. In all layers",
        "a float for every head, row and column of the attention is 384 MiB a sample, and so are two of",
        "every inner number of the perceptron. Which tensor of that time's PyTorch and transformers it is,",
        "if it is one, is not known here, nor which versions were measured.",
    ]
    return rows


def _title(row: Result) -> str:
    return f"batch {row['batch']}, gradients {'stay' if row['gradients_stay'] else 'let go'}"


def _mib(amount: int) -> str:
    return f"{amount / 2**20:,.0f}"
