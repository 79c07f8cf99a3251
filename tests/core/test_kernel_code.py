"""What the report reads from machine code, and the arithmetic that it does with it."""

from __future__ import annotations

import dataclasses

import kernel_report_code
import kernel_report_estimate
import pytest

# A loop with products and one around it, shortened from what nvdisasm prints.
MATRIX = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   LDG.E.U16 R3, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, !UPT ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/                   MUFU.EX2 R5, R5 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R23+0x10000], desc[UR36][R8.64], P3 ;
        /*0080*/                   NOP ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
        /*00a0*/               @P1 BRA `(.L_x_2) ;
        /*00b0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00c0*/                   CALL.REL.NOINC `($division) ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3) ;
        /*00f0*/                   NOP ;
"""


def test_the_main_loop_is_the_innermost_with_products() -> None:
    code = kernel_report_code.read(MATRIX)
    assert code.main.instructions == 7
    assert code.main.products == {"64x128x16": 2}
    assert (code.main.loads, code.main.stores) == ({16: 1}, {})
    assert (code.main.functions, code.main.pending) == (1, 1)
    assert (code.rest, code.calls) == (6, 1)
    assert kernel_report_estimate.others_per_product(code) == 2.5


def test_what_a_loop_moves_in_and_out_of_shared_memory() -> None:
    loop = kernel_report_code.read(MATRIX).main
    # Two products of two operands there, 64 rows and 128 columns of 32 bytes; a copy of 16 bytes.
    assert (loop.operands, loop.shared) == (2 * (64 + 128) * 32, 16)
    beside = """
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR16].tnspB, R24 ;
        /*0061*/                   LDS.64 R4, [R5] ;
        /*0062*/                   LDS R4, [R5] ;
        /*0063*/                   STS.128 [R5], R4 ;
        /*0064*/                   LDSM.16.M88.4 R4, [R5] ;
        /*0065*/                   STSM.16.MT88.2 [R5], R4 ;
"""
    loop = kernel_report_code.read(MATRIX.replace("        /*0060*/", beside + "/*0066*/", 1)).main
    assert (loop.operands, loop.shared) == (
        2 * (64 + 128) * 32 + 128 * 32,
        16 + 8 + 4 + 16 + 16 + 8,
    )


def test_without_products_it_is_the_loop_that_moves_most_or_all_of_the_code() -> None:
    loop = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0020*/                   FFMA R4, R4, R4, R4 ;
        /*0030*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
    """
    code = kernel_report_code.read(loop)
    assert (code.main.instructions, code.main.moved, code.rest) == (4, 12, 2)
    assert kernel_report_estimate.instructions_per_16_bytes(code) == pytest.approx(16 * 4 / 12)
    straight = "\n".join(
        line for line in loop.splitlines() if "BRA" not in line and "L_x" not in line
    )
    code = kernel_report_code.read(straight)
    assert (code.main.instructions, code.main.moved, code.rest) == (5, 12, 0)


def test_tiles_that_several_warps_compute_are_found() -> None:
    grid = "warpsPerCTA = [8, 1], instrShape = [16, 32, 16]"
    layout = f"#mma = #ttg.nvidia_mma<{{versionMajor = 3, {grid}}}>"
    dot = "  %s = ttng.warp_group_dot %q, %k, %c : !a * !b -> tensor<64x32xf32, #mma>"
    assert kernel_report_code.repeated_work(f"{layout}\n{dot}") == 2
    assert kernel_report_code.repeated_work(f"{layout}\n{dot.replace('64x32', '128x32')}") == 1
    assert kernel_report_code.repeated_work("no products") == 1


def test_what_a_loop_of_products_loads_from_the_l2_cache() -> None:
    # Shortened from Triton's intermediate code; what stands outside of the loop is loaded once.
    loop = """
    %q = tt.load %p : tensor<64x64x!tt.ptr<bf16>, #blocked>
    %acc:2 = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (tensor<64x128xf32, #mma>) : i32 {
      ttng.async_tma_copy_global_to_local %k[%i] %to, %bar, %on : !t -> !ttg.memdesc<128x64xbf16, #s>
      %w = ttg.async_copy_global_to_local %p, %to mask %m : tensor<64x!tt.ptr<f32>> -> <64xf32, #s>
      %l = tt.load %p, %m : tensor<32x!tt.ptr<i8>, #blocked>
      scf.if %m {
        %s = ttng.warp_group_dot %q, %k, %x : !ttg.memdesc<64x64xbf16, #s> * !b -> tensor<64x128xf32, #mma>
      }
      %s = tt.dot %q, %k, %x : tensor<64x16xbf16, #d> * tensor<16x128xbf16, #d> -> tensor<64x128xf32, #mma>
    } loc(#loc)
    """  # noqa: E501
    loaded, work = 128 * 64 * 2 + 64 * 4 + 32, 64 * 128 * (64 + 16)
    assert kernel_report_code.bytes_per_multiply_add(loop) == loaded / work
    assert kernel_report_code.bytes_per_multiply_add(loop.replace("dot", "add")) == 0
    copied = kernel_report_code.bytes_per_multiply_add(loop, copied=True)
    assert copied == 128 * 64 * 2 / work


def launch(**changes: float | None) -> kernel_report_estimate.Launch:
    usual = {"capability": 90, "warps": 8, "stages": 3, "registers": 168, "shared": 100 * 1024}
    return kernel_report_estimate.Launch(**{**usual, **changes})  # type: ignore[arg-type]


def test_blocks_that_run_together() -> None:
    assert launch().blocks == 1, "168 registers of 256 threads: one block in 65536"
    assert launch(registers=128).blocks == 2
    assert launch(registers=128, shared=150 * 1024).blocks == 1
    assert launch(registers=32, shared=0, warps=4).blocks == 16
    assert launch(registers=32, shared=0, warps=4, resident=2).blocks == 2


def test_a_product_of_which_half_the_clocks_are_other_work() -> None:
    # Two warp groups, 4 products of 64 x 256 x 16 a step: 1024 clocks of the matrix units.
    main = kernel_report_code.Loop(516, {}, {}, {"64x256x16": 4}, 0, 0, 0)
    code = kernel_report_code.Code(main, rest=0, calls=0)
    assert kernel_report_estimate.share_of_limit(code, launch()) == pytest.approx(0.5)
    waits = dataclasses.replace(code, main=dataclasses.replace(main, pending=1))
    assert kernel_report_estimate.share_of_limit(waits, launch()) == pytest.approx(1.0)
    # The L2 cache gives 32 bytes a clock, of which products at their full rate here ask for 48.
    asking = launch(loaded=48 / 2048)
    assert kernel_report_estimate.share_of_limit(waits, asking) == pytest.approx(32 / 48)
    finish = kernel_report_code.Code(waits.main, rest=8192, calls=0)
    assert kernel_report_estimate.share_of_limit(finish, launch()) == pytest.approx(0.5)


def test_a_stream_is_bound_by_instructions_or_by_what_is_under_way() -> None:
    main = kernel_report_code.Loop(200, {16: 1}, {16: 1}, {}, 0, 0, 0)
    code = kernel_report_code.Code(main, rest=0, calls=0)
    assert kernel_report_estimate.instructions_per_16_bytes(code) == 100
    full = launch(registers=32, shared=0, warps=4, stages=1)
    assert kernel_report_estimate.in_flight(code, full) == 16 * 128 * 16
    assert kernel_report_estimate.share_of_limit(code, full) == 1.0
    few = launch(registers=32, shared=0, warps=4, stages=1, resident=2)
    assert kernel_report_estimate.share_of_limit(code, few) == pytest.approx(2 * 4096 / 17_000)
    heavy = dataclasses.replace(code, main=dataclasses.replace(main, instructions=400))
    assert kernel_report_estimate.share_of_limit(heavy, full) == pytest.approx(0.53, abs=0.01)
