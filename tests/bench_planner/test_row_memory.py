"""Memory of measured steps of other trainers: published peaks, and what their optimizers keep."""

from __future__ import annotations

import evaluation
import pytest
from row_memory import row_memory

from fusedops.planner import load_device


def cells(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


GPT_22B = cells(
    "arch=dense layers=48 hidden=6144 heads=64 vocab=51200 seq=2048 gpu=A100 gpu_mem_gb=80 "
    "precision=fp16 recompute=full tp=8 pp=1 dp=1 mbs=4 gbs=4"
)
INTERN_7B = cells(
    "arch=dense-glu layers=32 hidden=4096 heads=32 vocab=103168 ffn=11008 seq=2048 gpu=A800 "
    "gpu_mem_gb=80 precision=bf16 recompute=full mbs=1 tp=1 pp=1 dp=1"
)
GPT_182B = cells(
    "arch=dense layers=78 hidden=13824 heads=96 vocab=250880 seq=2048 gpu=A100 gpu_mem_gb=80 "
    "precision=fp16 recompute=full gbs=2048 shard=zero1"
)


@pytest.mark.parametrize(
    ("row", "gib"),
    [
        (INTERN_7B | {"shard": "fsdp", "dp": "3", "gbs": "12"}, 72),
        (INTERN_7B | {"shard": "fsdp", "dp": "6", "gbs": "24"}, 39),
        (INTERN_7B | {"shard": "fsdp", "tp": "4", "gbs": "4"}, 52),
        (INTERN_7B | {"shard": "zero1", "tp": "4", "gbs": "4"}, 61),
        (INTERN_7B | {"shard": "zero1", "pp": "5", "gbs": "4"}, 62),
        (GPT_182B | {"tp": "8", "pp": "6", "dp": "8", "mbs": "4"}, 59),
        (GPT_182B | {"tp": "4", "pp": "12", "dp": "8", "mbs": "2"}, 48),
        (GPT_182B | {"tp": "4", "pp": "6", "dp": "16", "mbs": "4"}, 75),
    ],
)
def test_published_peaks(row: dict[str, str], gib: float) -> None:
    prediction = evaluation.predict(row)
    assert prediction.mem_gib == pytest.approx(gib, rel=0.09) and prediction.fits


def bytes_of(row: dict[str, str]) -> int:
    return row_memory(row, evaluation.shape_of(row)).needed


def test_an_unsharded_fp16_optimizer_needs_20_bytes_per_parameter() -> None:
    # Megatron's documentation: weights and gradients 2 + 2, master weights and moments 12, float32
    # gradients while it steps 4.
    few_tokens = GPT_22B | {"seq": "128", "mbs": "1", "gbs": "1"}
    parameters = 22.1e9 / 8
    assert bytes_of(few_tokens) == pytest.approx(20 * parameters, rel=0.02)
    assert bytes_of(few_tokens | {"precision": "bf16"}) == pytest.approx(18 * parameters, rel=0.03)


def test_a_full_device_does_without_the_allocators_cache() -> None:
    row = INTERN_7B | {"shard": "zero1", "pp": "3", "gbs": "4"}
    assert bytes_of(row) > 80 << 30
    prediction = evaluation.predict(row)  # 75 were measured
    assert prediction.fits and prediction.mem_gib == 80
    smaller = evaluation.predict(row | {"gpu_mem_gb": "72"})
    assert not smaller.fits and smaller.mem_gib is not None and smaller.mem_gib > 72


def test_other_precisions_and_devices_have_no_such_optimizer() -> None:
    plain = INTERN_7B | {"shard": "fsdp", "dp": "4", "gbs": "16"}
    for change in ({"precision": "amp_bf16"}, {"precision": "bf16-pure"}, {"gpu": "H100"}):
        assert bytes_of(plain | change) < 0.75 * bytes_of(plain)


def test_zero3_gathers_one_product_and_fsdp_a_layer() -> None:
    row = GPT_182B | {"tp": "1", "pp": "1", "dp": "512", "mbs": "1", "precision": "amp"}
    layer, product = 12 * 13824**2, 4 * 13824**2
    gathered = bytes_of(row | {"shard": "fsdp"}) - bytes_of(row | {"shard": "zero3"})
    assert gathered == pytest.approx((layer - product) * (2 * 2 + 4), rel=0.01)


def test_a_reserve_is_the_median_of_what_the_peaks_show() -> None:
    device = load_device("a100-80")
    rows = []
    for tokens, more in (("1024", 2.0), ("2048", 3.5), ("512", 9.0)):
        row = GPT_22B | {"seq": tokens}
        rows.append(row | {"mem_gib": str(bytes_of(row) / 2**30 + more)})
    assert evaluation.measured_reserve(rows, device) == pytest.approx(3.5 * 2**30, rel=1e-6)
    assert evaluation.measured_reserve([GPT_22B], device) is None
    assert device.memory.usable < device.memory.bytes - device.memory.reserved


def test_an_evaluation_counts_errors_of_memory_and_what_ran_out() -> None:
    row = GPT_182B | {"tp": "8", "pp": "6", "dp": "8", "mbs": "4", "source": "here"}
    predicted = evaluation.predict(row).mem_gib
    assert predicted is not None
    rows = [
        row | {"mem_gib": str(predicted / 1.1)},
        row | {"mem_gib": str(predicted / 0.9)},
        row | {"tp": "2", "pp": "24", "oom": "1"},
        row | {"tp": "1", "pp": "8", "dp": "48", "oom": "1", "gbs": "1536"},
    ]
    result = evaluation.evaluate(rows)
    error, count = result.memory_errors["here"]
    assert error == pytest.approx(10.0) and count == 2 and not result.errors
    assert result.fitting == (2, 2) and result.unfitting[1] == 2
