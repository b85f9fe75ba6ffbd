"""NVIDIA H200. Times are in us; numbers in brackets are files in benchmarks/h200/tuning."""

from typing import Final

from .table import (
    ANY,
    GemvCut,
    GemvTuning,
    LinearTuning,
    MlaTuning,
    PieceCut,
    PieceTuning,
    QkCacheTuning,
    QkTuning,
    RowTuning,
    StreamTuning,
    Tile,
    Tuning,
)

CHIPS: Final = (("cuda", 90),)

ROWS: Final = RowTuning(
    # Up to this many rows the next kernel may start at once, above it after the loads. Times at
    # once and after the loads: norm of 8 x 7168 1.38 and 1.44, of 64 x 7168 2.45 and 2.15 [29]; q
    # and k of 128 x (6144 + 1024), statistics 2.24 and 2.06, application 2.81 and 2.67 [34]. Rows
    # to fp8 with one scale: 32 x 7168 1.56 and 1.70, 64 x 7168 2.26 and 2.10 [33].
    early_rows=16,
    fp8_early_rows=32,
    # Times as a small and as a large batch: 512 x 128 to fp8 1.47 and 1.6, 1024 x 128 1.97 and
    # 1.62; to the norm 256 x 128 1.1 and 1.1, 512 x 128 1.47 and 1.25. Rows of more than 16384
    # bytes: 1024 x 16384 to fp8 14.9 and 17.0 [37].
    small_rows=256,
    small_long_rows=1024,
    long_row_bytes=16384,
    # From this many bytes of x on, norms of 4097 to 8192 columns are read twice, and LayerNorm to
    # codes loads gamma late. Times read twice and held: 8192 x 7168 56.8 and 56.2 [36], 12288 x
    # 7168 84.5 and 86.0, 16384 x 7168 111.7 and 113.5, 16384 x 8192 128.0 and 132.5, 20480 x 5120
    # 99.6 and 100.8 [37].
    streaming_bytes=160 << 20,
    # Up to this many columns of a row per thread, gamma is held in registers too: 8192 x 16384 to
    # fp8 with 128 columns per thread took 97.0 with gamma loaded late [26].
    most_held=64,
    # Tiles of up to 2048 columns, for small batches and norms, and for the rest. Times of both: 1 x
    # 1536 to fp8 1.04 and 1.11, 1 x 2048 1.08 and 1.19, but 16384 x 2048 26.1 and 25.0 [36].
    small_tile=Tile(4, 4),
    shared_tile=Tile(2),
    # By the longest row; small and streaming batches only where they need another tile than large
    # ones. Bfloat16. Norm: 16384 x 1536 25.0 (2 warps: 25.2) [36], 4096 x 7168 28.8 (4: 28.9),
    # 16384 x 4096 65.1 (4: 66.5), 8192 x 16384 read twice 128 (by 8: 144) [35]. Float32 gamma: 4096 x
    # 7168 29.0 (8: 30.9), 8192 x 16384 143 (8: 196) [28]. Residual: 16384 x 7168 225.5 (8: 228.1)
    # [36]. fp8: 16384 x 7168 82.4 (8: 91.1), 16384 x 4096 48.0 (8: 53.4) [35], 8192 x 16384 96.4
    # (8: 101.4, without the limit 110.1); with a residual 4096 x 7168 50.5 (8: 52.1) [36]. Groups
    # of 128: 4096 x 7168 24.4 (8: 27.4, without the limit 26.0) [35], 4096 x 8192 26.3 (8: 26.5)
    # [33], 16384 x 4096 49.1 (8: 55.2) [32], 8192 x 16384 109 (16: 111) [35]; storing the norm as
    # well 4096 x 7168 44.9 (whole chunks with `lane_scales`: 54.8) [36]. Small batches to fp8: 128
    # x 4096 2.05 (4: 2.15), 1 x 8192 1.43 (with a limit 1.53), 1 x 16384 2.03 (4: 2.59); with
    # groups and norm 1 x 7168 2.12 (the other way 2.34) [35, 36]. Static scale: 4096 x 7168 23.4 (limit of 96
    # registers: 53.5). LayerNorm to fp8 25.6 (8: 30.4), gated rows to fp8 36.7 (8: 39.2) [49]. LayerNorm with gamma
    # late: 16384 x 7168 to fp8 85.5 (early: 92.2, 2 warps: 86.9), to int8 87.0 (94.4), to mxfp8 88.9 (92.9), 16384 x
    # 8192 to fp8 99.4 (120.4), 16384 x 5120 66.3 (68.8); but 32768 x 4096 105.1 (103.6), 4096 x 7168 25.5 (25.2) [50].
    tiles={
        "large": {
            "norm": {8192: Tile(8), 16384: Tile(16, 0, 40, twice=True)},
            "norm, float32 gamma": {16384: Tile(4)},
            "norm, residual": {4096: Tile(4), 8192: Tile(16, 4)},
            "row scale": {4096: Tile(4), 7168: Tile(4, 0, 96), 8192: Tile(4), 16384: Tile(4, 0, 168)},
            "row scale, residual": {8192: Tile(4)},
            "static scale": {8192: Tile(4)},
            "group scales": {4096: Tile(4), 7168: Tile(4, 0, 96), 8192: Tile(4), 16384: Tile(8)},
            "group scales, norm": {4096: Tile(4), 8192: Tile(8, 8, 80)},
            "layer norm, row scale": {8192: Tile(4)},
            "layer norm, group scales": {8192: Tile(4)},
            "layer norm, gate or bias": {8192: Tile(4)},
        },
        "small": {
            "row scale": {4096: Tile(8), 8192: Tile(4), 16384: Tile(8, 0, 128)},
            "group scales": {8192: Tile(4), 16384: Tile(8)},
            "group scales, norm": {4096: Tile(4), 8192: Tile(8)},
        },
        "streaming": {
            "norm": {4096: Tile(8), 8192: Tile(8, 8, 56, twice=True)},
            "layer norm, row scale": {4096: Tile(4), 7168: Tile(4, 0, 80, late=True), 8192: Tile(4, 0, 96, late=True)},
            "layer norm, group scales": {6144: Tile(4), 7168: Tile(4, 0, 96, late=True)},
        },
    },
    # Rows of more than 16384 columns with 16 and with 32 warps: 2048 x 20480 to the norm 45.7 and
    # 56.3, 2048 x 40960 109 and 93.3, to fp8 88.9 and 107.5. With a limit of 32 registers 2048 x
    # 20480 to fp8 takes 44.4 instead of 46.9 [35, 36].
    long_norm_columns=24576,
    long_fp8_registers=32,
    long_prologue_registers=128,
)

STREAM: Final = StreamTuning(
    unaligned_registers=168,  # by default the assembler uses 128 where it needs a few more, and spills
)

GEMV: Final = GemvTuning(
    most_rows=32,  # of act per program
    unaligned_rows=16,  # where elements are loaded one by one, each into a register of its own
    # Bfloat16 [20]. A multiprocessor runs one block for every 4 columns of its share of N, as long
    # as all fit at once: 2112 x 7168 took 7.7 (8 columns: 8.2), 2624 x 6144 8.4 with fewer
    # registers (9.5 with as many), 4096 x 4096 9.0 with 8 columns (10.7). More rows of act are
    # worth more columns and warps, which read act less often: M = 4 took 8.1 (4 warps: 9.2), M = 8
    # 9.0 (4 warps: 12.9; 16: 9.7), M = 16 11.9 with 16 warps (8: 12.3). More than 16 rows [38]: M =
    # 32 14.2 (2 deep: 17.8), 64 23.1 (3 deep: 26.7). With each row normed by another program, in a
    # chain and behind an ordinary kernel [57]: M = 16 10.5 / 13.0 with split-K (6 more bytes ahead
    # 10.2 / 13.6; without split-K 12.1 / 16.0), fp8 rows 6.4 / 8.6, M = 4 7.1 / 8.6 (paced 6.7 / 9.3).
    cuts=(
        (2, 2112, GemvCut(4, 4, 9, 2, 3)),
        (2, 2640, GemvCut(4, 4, 5, 1, 2)),
        (2, ANY, GemvCut(4, 8, 4, 1, 1)),
        (4, ANY, GemvCut(8, 8, 8, 2, 3)),
        (8, 4224, GemvCut(8, 8, 7, 2, 2)),
        (8, ANY, GemvCut(16, 48, 2, 1, 0)),
        (16, 2640, GemvCut(16, 16, 7, 4, 4, split=True)),
        (16, 4224, GemvCut(16, 32, 4, 2, 0)),
        (16, ANY, GemvCut(16, 48, 2, 1, 0)),
        (32, ANY, GemvCut(16, 16, 3, 1, 2)),
        (ANY, ANY, GemvCut(16, 16, 2, 1, 0)),
    ),
    codes=(
        (2, 4224, GemvCut(4, 4, 5, 1, 2)),
        (2, ANY, GemvCut(4, 8, 3, 1, 0)),
        (4, 2640, GemvCut(8, 8, 4, 2, 0)),
        (4, ANY, GemvCut(8, 16, 3, 1, 0)),
        (8, 2640, GemvCut(16, 16, 4, 2, 0)),
        (16, 2640, GemvCut(16, 16, 5, 1, 0)),
        (16, 4224, GemvCut(16, 32, 3, 1, 0)),
        (16, ANY, GemvCut(16, 48, 2, 1, 0)),
        (ANY, ANY, GemvCut(16, 16, 2, 1, 0)),
    ),
)

PIECES: Final = PieceTuning(
    group=8,
    # Bfloat16, chain of itself and behind an ordinary kernel [42]. Cubes of few rows must all be resident
    # at once, which limits their stages: 4096 x 4096 10.2 / 11.0 (128 columns of K, four stages: 12.6 / 11.0;
    # 32 columns: 10.3 / 11.2), 6144 x 4096 14.3 / 15.2 (five stages, at once: 15.3 / 16.3), M = 16 15.2 / 16.2
    # (four: 18.0 / 19.0). With one piece the next kernel starts late: 24576 x 4096, M = 8, 48.5 / 47.0 (at
    # once: 49.1 / 47.3). M = 64 to 8192: 6144 x 4096 17.8 (flat: 18.3), 26.1 for 256 rows (four stages:
    # 30.1), 24576 x 4096 136.9 for 512 (256 columns: 161.6), 565 for 2048 (256 columns: 638), 2343 for 8192
    # (four stages: 2569). A program per piece: 2112 x 7168 14.3 for 64 rows (cube: 17.6) and 17.1 for 128 (flat: 19.6),
    # 4096 x 12288 28.7 for 32 (cube: 30.5), 31.2 for 64 (flat: 33.8), 36.8 for 128 (64 columns and rows: 39.5), but
    # 4096 x 4096 18.4 for 128 (64 columns and rows: 15.3). 24576 x 4096 54.4 for 128 (256 columns: 62.7) [45].
    cuts={
        4: (
            (8, 2112, ANY, PieceCut("cube", 16, 8, 128, 5, 4)),
            (8, 4224, ANY, PieceCut("cube", 16, 8, 256, 3, 4)),
            (8, ANY, ANY, PieceCut("cube", 16, 8, 128, 3, 4, late=True)),
            (16, 4224, ANY, PieceCut("cube", 16, 16, 128, 4, 4)),
            (16, ANY, ANY, PieceCut("cube", 16, 16, 128, 3, 4)),
            (32, 2112, ANY, PieceCut("cube", 16, 32, 128, 4, 4)),
            (32, 4224, 8192, PieceCut("cube", 16, 32, 128, 3, 4)),
            (32, 4224, ANY, PieceCut("split", 64, 32, 128, 4, 4, late=True)),
            (32, 4224, ANY, PieceCut("cube", 16, 32, 128, 3, 4)),
            (32, ANY, ANY, PieceCut("flat", 64, 32, 64, 8, 4)),
            (64, 2640, ANY, PieceCut("split", 64, 32, 128, 3, 4, late=True)),
            (64, 2640, ANY, PieceCut("cube", 32, 32, 64, 4, 4)),
            (64, 4224, 8192, PieceCut("flat", 64, 32, 64, 8, 4, late=True)),
            (64, 4224, ANY, PieceCut("split", 64, 64, 128, 3, 4, late=True)),
            (64, 4224, ANY, PieceCut("flat", 64, 32, 64, 8, 4, late=True)),
            (64, ANY, ANY, PieceCut("descriptors", 64, 32, 64, 8, 4, late=True)),
            (128, 2640, ANY, PieceCut("split", 64, 64, 128, 3, 4, late=True)),
            (128, 2640, ANY, PieceCut("flat", 64, 32, 128, 4, 4)),
            (128, 4224, 8192, PieceCut("descriptors", 64, 64, 128, 4, 4)),
            (128, 4224, ANY, PieceCut("split", 128, 128, 64, 6, 8, late=True)),
            (128, ANY, ANY, PieceCut("descriptors", 64, 128, 64, 6, 4)),
            (256, 2640, ANY, PieceCut("descriptors", 64, 64, 128, 4, 4)),
            (256, 4224, ANY, PieceCut("descriptors", 64, 128, 64, 6, 4)),
            (256, ANY, ANY, PieceCut("descriptors", 128, 128, 64, 6, 8)),
            (512, 2640, ANY, PieceCut("descriptors", 64, 128, 64, 6, 4)),
            (512, 4224, ANY, PieceCut("descriptors", 128, 128, 64, 6, 8)),
            (ANY, 2640, ANY, PieceCut("descriptors", 128, 128, 64, 6, 8)),
            (ANY, ANY, ANY, PieceCut("descriptors", 256, 128, 64, 4, 8)),
            (ANY, ANY, ANY, PieceCut("flat", 64, 64, 128, 3, 4)),
            (ANY, ANY, ANY, PieceCut("cube", 32, 64, 64, 3, 8)),
        ),
        1: (
            (16, 8448, ANY, PieceCut("flat", 64, 16, 128, 5, 4, late=True)),
            (16, ANY, ANY, PieceCut("flat", 64, 16, 128, 3, 4, late=True)),
            (32, 8448, ANY, PieceCut("flat", 64, 32, 64, 8, 4, late=True)),
            (32, ANY, ANY, PieceCut("flat", 64, 32, 128, 3, 4)),
            (64, 8448, ANY, PieceCut("descriptors", 128, 32, 64, 8, 4, late=True)),
            (64, ANY, ANY, PieceCut("descriptors", 128, 64, 64, 6, 4, late=True)),
            (128, 8448, ANY, PieceCut("descriptors", 128, 64, 64, 6, 4)),
            (128, ANY, ANY, PieceCut("descriptors", 128, 64, 64, 3, 4, late=True)),
            (256, ANY, ANY, PieceCut("descriptors", 128, 128, 64, 6, 8)),
            (512, ANY, ANY, PieceCut("descriptors", 128, 256, 64, 4, 8)),
            (2048, 8448, ANY, PieceCut("descriptors", 128, 128, 64, 6, 8)),
            (2048, ANY, ANY, PieceCut("descriptors", 128, 256, 64, 4, 8)),
            (ANY, ANY, ANY, PieceCut("descriptors", 128, 256, 64, 3, 8)),
            (ANY, ANY, ANY, PieceCut("flat", 64, 64, 64, 6, 4)),
            (16, ANY, ANY, PieceCut("cube", 64, 16, 128, 3, 4)),
            (ANY, ANY, ANY, PieceCut("cube", 64, 64, 64, 3, 8)),
        ),
    },
    # Fp8, chain of itself and behind an ordinary kernel, scale per row and per block [44]. M = 1: 4096 x 4096 6.7 / 7.4
    # and 6.4 / 7.3 (16 columns: 6.6 / 7.6 and 6.4 / 7.5), 4096 x 12288 14.4 / 15.7 and 14.3 / 15.6, 24576 x 4096 26.4 /
    # 27.5 and 27.1 / 28.3 (64 columns: 28.3 / 29.3 and 27.7 / 28.3), 24576 x 1536 12.1 / 13.1 and 11.4 / 12.3 (32
    # columns: 11.5 / 12.4 and 12.4 / 13.2). M = 16: 4096 x 4096 7.1 / 7.7 and 8.1 / 8.7 (four stages: 9.6 / 7.7), 24576
    # x 4096 29.4 / 30.4 and 30.6 / 31.5 (four: 32.5 / 33.5). M = 32: 4096 x 4096 8.9 / 9.3 (flat: 31 / 26). M = 256:
    # 24576 x 4096 179 / 180, 4096 x 4096 40 / 41. Steps of 256 columns become 128 with a scale per block. Decoded first,
    # with a scale per row and per block: 4096 x 4096 at 128 rows 26.4 and 27.4 (flat: 36.1 and 36.1), at 1024 58.3 and
    # 98.6 (105 and 153); 24576 x 4096 at 128 rows 142 and 152 (104 and 165), at 256 163 and 205 (155 and 242), at 4096
    # 1230 and 2090 (2645 and 3625) [47].
    codes=(
        (8, 2640, ANY, PieceCut("cube", 16, 8, 128, 5, 8)),
        (8, 4224, ANY, PieceCut("cube", 32, 8, 256, 4, 4)),
        (8, 6800, ANY, PieceCut("cube", 16, 8, 128, 4, 4, late=True)),
        (8, 8448, ANY, PieceCut("cube", 32, 8, 256, 3, 4, late=True)),
        (8, ANY, 2048, PieceCut("cube", 64, 8, 128, 2, 4, late=True)),
        (8, ANY, ANY, PieceCut("cube", 16, 8, 256, 2, 4)),
        (16, 2640, ANY, PieceCut("cube", 16, 16, 128, 4, 8)),
        (16, 4224, ANY, PieceCut("cube", 32, 16, 128, 5, 4)),
        (16, 8448, ANY, PieceCut("cube", 32, 16, 128, 3, 4, late=True)),
        (16, ANY, 2048, PieceCut("cube", 64, 16, 128, 2, 4, late=True)),
        (16, ANY, ANY, PieceCut("cube", 32, 16, 128, 3, 4)),
        (64, 2640, ANY, PieceCut("cube", 16, 32, 128, 2, 8)),
        (64, 6800, ANY, PieceCut("cube", 16, 32, 128, 3, 4)),
        (32, ANY, ANY, PieceCut("flat", 64, 32, 128, 4, 4)),
        (64, ANY, ANY, PieceCut("flat", 64, 64, 128, 3, 4)),
        (128, 8448, ANY, PieceCut("decoded", 64, 64, 128, 4, 4)),
        (256, 2640, ANY, PieceCut("decoded", 64, 64, 128, 4, 4)),
        (256, 6800, ANY, PieceCut("decoded", 64, 128, 64, 6, 4)),
        (256, 6800, ANY, PieceCut("flat", 64, 64, 128, 4, 4)),
        (128, ANY, ANY, PieceCut("flat", 128, 128, 128, 4, 8)),
        (1024, 2640, ANY, PieceCut("decoded", 64, 128, 64, 6, 4)),
        (ANY, 2640, ANY, PieceCut("decoded", 128, 128, 64, 6, 8)),
        (512, 6800, ANY, PieceCut("decoded", 128, 128, 64, 6, 8)),
        (256, ANY, ANY, PieceCut("decoded", 128, 128, 64, 6, 8)),
        (ANY, ANY, ANY, PieceCut("decoded", 256, 128, 64, 4, 8)),
        (ANY, ANY, ANY, PieceCut("flat", 128, 128, 128, 4, 8)),
        (ANY, ANY, ANY, PieceCut("cube", 32, 64, 64, 3, 4)),
    ),
    blocks=PieceCut("decoded", 128, 64, 128, 4, 8),
    # Static weights, each behind a norm, M = 1 / 8 and 16; in brackets the tile from above without early reads [53]. 4096 x
    # 4096 10.4 / 10.8 (11.7 / 12.0) and 11.3 (12.8), 6144 x 4096 14.5 / 14.8 (15.6 / 17.5) and 15.6 (17.0), 4096 x 12288
    # 26.1 / 27.0 (27.7 / 28.4) and 27.9 (29.9), 2112 x 7168 11.3 / 11.5 (11.8 / 14.9) and 11.6 (14.1), 24576 x 1536 19.3 /
    # 20.1 (20.9 / 21.6), 24576 x 4096 48.6 / 50.3 (49.3 / 51.4). Up to four programs per multiprocessor: 28672 x 4096
    # 59.2 / 59.6 (67.5 / 67.5), 30720 x 3840 56.6 / 57.2 (63.3 / 63.1), 32000 x 4096 62.5 / 63.5 (67.1 / 67.4). Six stages
    # for up to 8448 columns leave room for one program per multiprocessor. With five, programs that start early share some
    # multiprocessors and leave others idle.
    static_cuts={
        4: (
            (8, 2112, ANY, PieceCut("cube", 32, 8, 128, 4, 4, late=True)),
            (8, 4224, ANY, PieceCut("cube", 16, 8, 256, 3, 4)),
            (8, ANY, ANY, PieceCut("cube", 16, 8, 128, 4, 4)),
            (16, 2112, ANY, PieceCut("cube", 16, 16, 128, 5, 4)),
            (16, 4224, ANY, PieceCut("cube", 32, 16, 128, 4, 4)),
        ),
        1: (
            (16, 8448, ANY, PieceCut("flat", 64, 16, 128, 6, 4, late=True)),
            (16, 25344, ANY, PieceCut("flat", 64, 16, 128, 3, 4)),
            (16, 33792, ANY, PieceCut("flat", 64, 16, 128, 4, 4)),
            (16, ANY, ANY, PieceCut("flat", 64, 16, 128, 3, 4)),
        ),
    },
    # A scale per row: 4096 x 12288 16.2 / 17.4 (17.4 / 18.2), 12288 x 4096 15.2 / 16.2 (16.1 / 17.1), 22016 x 4096 26.6 /
    # 26.8 (27.4 / 28.2), 28672 x 4096 32.8 / 33.3 (34.1 / 35.5) and 37.1 (38.6), 7168 x 18432 42.7 for 16 rows (44.2). A
    # decode step of Qwen3-8B's sizes takes 562 with these tiles of 4096 x 4096 and 6144 x 4096 and 580 with others [54], with 16
    # rows 688 with that of 4096 x 12288 (the ordinary one: 700) [52].
    static_codes=(
        (8, 2640, ANY, PieceCut("cube", 16, 8, 128, 5, 8)),
        (8, 4224, 8192, PieceCut("cube", 16, 8, 128, 4, 4)),
        (8, 4224, ANY, PieceCut("cube", 16, 8, 128, 6, 4)),
        (8, 6800, ANY, PieceCut("cube", 16, 8, 256, 3, 4)),
        (8, 8448, ANY, PieceCut("cube", 32, 8, 256, 3, 4, late=True)),
        (8, 25344, 2048, PieceCut("cube", 32, 8, 128, 3, 4)),
        (8, 25344, ANY, PieceCut("cube", 16, 8, 128, 3, 4)),
        (8, 33792, ANY, PieceCut("cube", 32, 8, 128, 3, 4)),
        (8, ANY, ANY, PieceCut("cube", 16, 8, 256, 2, 4)),
        (16, 2640, ANY, PieceCut("cube", 16, 16, 128, 4, 8)),
        (16, 4224, 8192, PieceCut("cube", 32, 16, 128, 5, 4)),
        (16, 4224, ANY, PieceCut("cube", 32, 16, 128, 6, 4, late=True)),
        (16, 8448, ANY, PieceCut("cube", 32, 16, 128, 4, 4)),
        (16, 25344, 2048, PieceCut("cube", 64, 16, 128, 2, 4, late=True)),
        (16, 25344, ANY, PieceCut("cube", 32, 16, 128, 3, 4)),
        (16, 33792, ANY, PieceCut("cube", 64, 16, 128, 3, 4)),
        (16, ANY, ANY, PieceCut("cube", 32, 16, 128, 3, 4)),
    ),
)

LINEAR: Final = LinearTuning(normed_rows=4, normed_columns=2048)  # not measured

QK: Final = QkTuning(
    tile=4096,  # elements of a tile of short rows; 1024 per warp
    warps=4,  # of a program whose rows come in chunks, at least
    # Chunks per row, 4096 x (6144 + 1024) [22, 23]: with 1, 2, 4 and 8 warps along a row of q
    # statistics took 14.8, 14.5, 14.1 and 14.2, the whole norm 39.3, 34.1, 31.7 and 32.0. With
    # gamma loaded early, for which only few chunks leave the registers, it took 32.9, and 30.0 with
    # two warps along a row of k instead of one.
    most_chunks=4,
    apply_tile=8192,  # elements of a tile where statistics are given: four rows of 2048 columns share one read of gamma
    pieces=(2048, 1024, 512, 256),
    rows_per_thread=4,  # each row costs a thread two addresses
    registers=128,  # where a norm is stored; by default the assembler may use 80 and spill
)

MLA: Final = MlaTuning(
    # Requests that a search examines together: one, as many as a warp has threads, or several loads
    # per thread. More requests need several levels of the last width.
    search_widths=(1, 32, 128),
    early_programs=16,  # the next kernel at once, or after the loads: 64 tokens of 128 heads 2.36 and 1.70 [25]
    most_columns=16,  # of a latent per thread
    most_tokens=8,  # per program: each one adds code
    threads=32,
    # Elements of q, and columns per tile. One token took 0.93 with 512 (1024: 1.04), 64 tokens of
    # 128 heads 1.70 with 1024 (2048: 1.90), 2048 tokens of 128 heads 18.6 with 2048 (1024: 22.5)
    # [25].
    q_columns=((1 << 17, 512), (1 << 20, 1024), (ANY, 2048)),
    # Tokens, and columns of latents per program: one row of 512 up to 1023 tokens, two (2048 tokens
    # of 16 heads 4.5; one: 4.8; four: 5.9), then four (8192 of 16: 13.4; one: 16.3) [25].
    kv_columns=((1023, 512), (4095, 1024), (ANY, 2048)),
)

QK_CACHE: Final = QkCacheTuning(
    early_programs=16,
    # Elements of q, k and v together, and columns per program. With 2048 columns a thread needs up to 180 registers
    # (1024: 90).
    columns=((1 << 17, 512), (ANY, 1024)),
    whole_columns=1024,
    most_warps=8,
)

TUNING: Final = Tuning(ROWS, STREAM, GEMV, PIECES, LINEAR, QK, MLA, QK_CACHE)
