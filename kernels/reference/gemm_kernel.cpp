// SPDX-License-Identifier: MIT
// Blocked GEMM: a task is a block of columns of D by a range of its rows. It packs its columns of B once as
// fp32 [k][16] panels, decodes A a tile of rows at a time, and runs a 6x16 register kernel over both. Vector
// lanes hold different outputs, never parts of one sum, so that the blocking does not change the order in
// which an output is summed.
#include "kernels/reference/gemm_kernel.h"

#include "kernels/reference/rows.h"

#include <omp.h>

#include <algorithm>
#include <utility>

namespace fp8flow::reference {

namespace {

// A tile's 12 accumulators of 8 floats leave 4 of 16 vector registers for operands.
constexpr int64_t kTileRows = 6, kTileCols = 16, kTileSize = kTileRows * kTileCols;
// Of one task's packed tile of A and block of B: 2 MiB and 4 MiB, unless one panel needs more.
constexpr int64_t kMaxRowsA = 72, kMaxColsB = 256, kMaxFloatsA = 1 << 19, kMaxFloatsB = 1 << 20;
// Contraction between visits of the accumulators in memory: 16 KiB of B in L1. kSplitChunk: for plain
// operands under SummationOrder::split.
constexpr int64_t kChunk = 256, kSplitChunk = 32;
// Floats between rows of A, so that rows do not compete for one cache set.
constexpr int64_t kRowPadding = 16;
constexpr double kParallelFlops = 1e6;

// acc[6][16] += A B over `depth` steps; row i of A starts at a + i * row_stride. Not sanitized, because
// sanitizers make a GEMM a hundred times slower. It reads only what decode_a and pack_b wrote.
__attribute__((no_sanitize("address", "undefined", "thread")))  //
void accumulate_tile(int64_t depth, const float* __restrict a, int64_t row_stride, int64_t k_stride,
                     const float* __restrict b, float* __restrict tile) {
    float acc[kTileRows][kTileCols];
    for (int64_t i = 0; i < kTileRows; ++i)
        for (int64_t j = 0; j < kTileCols; ++j) acc[i][j] = tile[i * kTileCols + j];
    const float* rows[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i) rows[i] = a + i * row_stride;
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 6
        for (int64_t i = 0; i < kTileRows; ++i) {
#pragma omp simd
            for (int64_t j = 0; j < kTileCols; ++j)
                // not fma_float: it has sanitizers and would not be inlined
                acc[i][j] = __builtin_fmaf(rows[i][k * k_stride], b[k * kTileCols + j], acc[i][j]);
        }
    }
    for (int64_t i = 0; i < kTileRows; ++i)
        for (int64_t j = 0; j < kTileCols; ++j) tile[i * kTileCols + j] = acc[i][j];
}

// tile = fma(partial, scale_a * scale_b, tile)
void promote_tile(const float* __restrict partial, const float* __restrict scale_a,
                  const float* __restrict scale_b, float* __restrict tile) {
    for (int64_t i = 0; i < kTileRows; ++i) {
        for (int64_t j = 0; j < kTileCols; ++j) {
            float& acc = tile[i * kTileCols + j];
            acc = fma_float(partial[i * kTileCols + j], scale_a[i] * scale_b[j], acc);
        }
    }
}

// How the contraction of one GEMM is cut.
struct Blocks {
    int64_t scale_block;  // contraction elements under one pair of scales; 0: scales are constant along it,
                          // or absent
    int64_t chunk;        // contraction elements per call of accumulate_tile
    int64_t num_scale_blocks, num_chunks;
};

Blocks blocks_of(const GemmProblem& problem, SummationOrder order) {
    const int64_t a = problem.a.scale.place.block, b = problem.b.scale.place.block;
    Blocks blocks{};
    blocks.scale_block = a == 0 ? b : (b == 0 ? a : std::min(a, b));
    blocks.chunk = blocks.scale_block != 0 ? blocks.scale_block
                                           : (order == SummationOrder::split ? kSplitChunk : kChunk);
    blocks.num_chunks = ceil_div(problem.k, blocks.chunk);
    blocks.num_scale_blocks = blocks.scale_block != 0 ? blocks.num_chunks : 1;
    return blocks;
}

bool has_scales(const GemmProblem& problem) { return problem.a.scale.scales || problem.b.scale.scales; }

struct Task {
    const GemmProblem* problem;
    int64_t row, num_rows, col, num_cols;
};

struct Scratch {
    float* a;         // [rows, k + padding], or [k, rows] where A is stored with outputs contiguous
    float* b;         // [cols/16][k][16]
    float* scales_a;  // [scale blocks, rows]
    float* scales_b;  // [scale blocks, cols]
    float* tiles[2];  // [rows/6][cols/16] tiles of 6x16; the second for SummationOrder::split
};

int64_t rows_per_tile(int64_t k) {
    return std::clamp(kMaxFloatsA / (k + kRowPadding) / kTileRows * kTileRows, kTileRows, kMaxRowsA);
}

int64_t cols_per_task(int64_t k) {
    return std::clamp(kMaxFloatsB / std::max<int64_t>(k, 1) / kTileCols * kTileCols, kTileCols, kMaxColsB);
}

// Columns [col, col + count) of B as panels of 16 columns, [k][16] each; missing columns of the last panel
// are zeros.
void pack_b(const Operand& b, int64_t col, int64_t count, int64_t k, float* out) {
    for (int64_t first = 0; first < count; first += kTileCols, out += k * kTileCols) {
        const int64_t width = std::min(kTileCols, count - first);
        const int64_t start = b.offset + (col + first) * b.output_stride;
        if (width < kTileCols) std::fill_n(out, k * kTileCols, 0.0f);
        if (b.output_stride == 1) {
            for (int64_t i = 0; i < k; ++i)
                load_floats(b.data, start + i * b.k_stride, width, out + i * kTileCols);
            continue;
        }
        float rows[kTileCols][kChunk];
        for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
            const int64_t depth = std::min(kChunk, k - k0);
            for (int64_t j = 0; j < width; ++j)
                load_floats(b.data, start + j * b.output_stride + k0, depth, rows[j]);
            for (int64_t j = 0; j < width; ++j)
                for (int64_t i = 0; i < depth; ++i) out[(k0 + i) * kTileCols + j] = rows[j][i];
        }
    }
}

struct PackedRows {
    int64_t row_stride, k_stride;
};

// Rows [row, row + count) of A as fp32 in the orientation they are stored in; rows up to a multiple of 6 are
// zeros.
PackedRows decode_a(const Operand& a, int64_t row, int64_t count, int64_t k, float* out) {
    const int64_t padded = round_up(count, kTileRows);
    if (a.k_stride == 1) {
        const int64_t stride = k + kRowPadding;
        for (int64_t i = 0; i < count; ++i)
            load_floats(a.data, a.offset + (row + i) * a.output_stride, k, out + i * stride);
        for (int64_t i = count; i < padded; ++i) std::fill_n(out + i * stride, k, 0.0f);
        return {stride, 1};
    }
    for (int64_t i = 0; i < k; ++i) {
        load_floats(a.data, a.offset + row + i * a.k_stride, count, out + i * padded);
        std::fill_n(out + i * padded + count, padded - count, 0.0f);
    }
    return {1, padded};
}

// out[block][padded]: scales of entries [first, first + count) for each scale block of the GEMM.
void load_scales(const OperandScale& scale, int64_t first, int64_t count, int64_t padded,
                 const Blocks& blocks, float* out) {
    for (int64_t block = 0; block < blocks.num_scale_blocks; ++block, out += padded) {
        std::fill_n(out, padded, 1.0f);
        if (!scale.scales) continue;
        const int64_t k = block * blocks.scale_block;
        if (scale.place.row_stride == 1 && scale.place.rows_per_scale == 1) {
            load_floats(scale.scales, scale.offset + scale.place.of(first, k), count, out);
            continue;
        }
        for (int64_t i = 0; i < count; ++i)
            load_floats(scale.scales, scale.offset + scale.place.of(first + i, k), 1, out + i);
    }
}

// The part of a tile that lies inside D.
struct TilePart {
    int64_t row, rows, col, cols;
};

// A tile's sums before the first term.
void start_tile(const GemmProblem& problem, const TilePart& part, float* tile) {
    std::fill_n(tile, kTileSize, 0.0f);
    for (int64_t i = 0; problem.start == Start::d && i < part.rows; ++i)
        load_floats(problem.d, problem.d_offset + (part.row + i) * problem.n + part.col, part.cols,
                    tile + i * kTileCols);
}

// Rounds and writes a tile.
void store_tile(const GemmProblem& problem, const TilePart& part, const float* tile) {
    for (int64_t i = 0; i < part.rows; ++i) {
        const int64_t offset = problem.d_offset + (part.row + i) * problem.n + part.col, cols = part.cols;
        const float* values = tile + i * kTileCols;
        if (problem.mode == Gradient::accumulate) {
            float* d = static_cast<float*>(problem.d.data) + offset;
            for (int64_t j = 0; j < cols; ++j) d[j] += values[j];
        } else {
            store_floats(problem.d, offset, cols, values);
        }
    }
}

void run_task(const Task& task, SummationOrder order, const Scratch& scratch) {
    const GemmProblem& problem = *task.problem;
    const Blocks blocks = blocks_of(problem, order);
    const bool promoted = blocks.scale_block != 0;
    const bool one_partial = !promoted && has_scales(problem);  // the whole contraction
    const int64_t num_sums = order == SummationOrder::split ? 2 : 1;
    const int64_t col_tiles = ceil_div(task.num_cols, kTileCols), padded_cols = col_tiles * kTileCols;
    pack_b(problem.b, task.col, task.num_cols, problem.k, scratch.b);
    load_scales(problem.b.scale, task.col, task.num_cols, padded_cols, blocks, scratch.scales_b);

    const int64_t rows_per_pass = rows_per_tile(problem.k);
    for (int64_t row = task.row; row < task.row + task.num_rows; row += rows_per_pass) {
        const int64_t num_rows = std::min(rows_per_pass, task.row + task.num_rows - row);
        const int64_t row_tiles = ceil_div(num_rows, kTileRows), padded_rows = row_tiles * kTileRows;
        const PackedRows a = decode_a(problem.a, row, num_rows, problem.k, scratch.a);
        load_scales(problem.a.scale, row, num_rows, padded_rows, blocks, scratch.scales_a);
        const auto each_tile = [&](auto visit) {
            for (int64_t tj = 0; tj < col_tiles; ++tj)
                for (int64_t ti = 0; ti < row_tiles; ++ti)
                    visit(ti, tj,
                          TilePart{row + ti * kTileRows, std::min(kTileRows, num_rows - ti * kTileRows),
                                   task.col + tj * kTileCols,
                                   std::min(kTileCols, task.num_cols - tj * kTileCols)},
                          (tj * row_tiles + ti) * kTileSize);
        };
        for (int64_t s = 0; s < num_sums; ++s) std::fill_n(scratch.tiles[s], padded_rows * padded_cols, 0.0f);
        if (!one_partial)
            each_tile([&](int64_t, int64_t, const TilePart& part, int64_t at) {
                start_tile(problem, part, scratch.tiles[0] + at);
            });

        for (int64_t chunk = 0; chunk < blocks.num_chunks; ++chunk) {
            const int64_t k0 = chunk * blocks.chunk, depth = std::min(blocks.chunk, problem.k - k0);
            float* tiles = scratch.tiles[chunk % num_sums];
            for (int64_t tj = 0; tj < col_tiles; ++tj) {
                const float* b_panel = scratch.b + (tj * problem.k + k0) * kTileCols;
                for (int64_t ti = 0; ti < row_tiles; ++ti) {
                    const float* a_rows = scratch.a + ti * kTileRows * a.row_stride + k0 * a.k_stride;
                    float* tile = tiles + (tj * row_tiles + ti) * kTileSize;
                    if (!promoted) {
                        accumulate_tile(depth, a_rows, a.row_stride, a.k_stride, b_panel, tile);
                        continue;
                    }
                    float partial[kTileSize] = {};
                    accumulate_tile(depth, a_rows, a.row_stride, a.k_stride, b_panel, partial);
                    promote_tile(partial, scratch.scales_a + chunk * padded_rows + ti * kTileRows,
                                 scratch.scales_b + chunk * padded_cols + tj * kTileCols, tile);
                }
            }
        }
        each_tile([&](int64_t ti, int64_t tj, const TilePart& part, int64_t at) {
            float* tile = scratch.tiles[0] + at;
            for (int64_t i = 0; num_sums == 2 && i < kTileSize; ++i) tile[i] += scratch.tiles[1][at + i];
            if (one_partial) {
                float partial[kTileSize];
                std::copy_n(tile, kTileSize, partial);
                start_tile(problem, part, tile);
                promote_tile(partial, scratch.scales_a + ti * kTileRows, scratch.scales_b + tj * kTileCols,
                             tile);
            }
            store_tile(problem, part, tile);
        });
    }
}

// Cuts the GEMMs into tasks: whole columns where there are enough of them (B is packed once), otherwise rows
// as well.
std::vector<Task> tasks_of(const std::vector<GemmProblem>& problems, int64_t num_threads) {
    constexpr int64_t kMinCols = 64, kMinRows = 96;
    const auto blocks_wide = [&](int64_t limit) {
        int64_t total = 0;
        for (const GemmProblem& p : problems)
            total += p.m > 0 ? ceil_div(p.n, std::min(limit, cols_per_task(p.k))) : 0;
        return total;
    };
    int64_t width = kMaxColsB;
    while (width > kMinCols && blocks_wide(width) < 4 * num_threads) width /= 2;
    const int64_t row_parts =
        num_threads > 1 ? ceil_div(2 * num_threads, std::max<int64_t>(blocks_wide(width), 1)) : 1;
    std::vector<Task> tasks;
    for (const GemmProblem& p : problems) {
        const int64_t cols = std::min(width, cols_per_task(p.k));
        const int64_t rows = std::max(kMinRows, round_up(ceil_div(p.m, row_parts), kTileRows));
        for (int64_t row = 0; row < p.m; row += rows)
            for (int64_t col = 0; col < p.n; col += cols)
                tasks.push_back({&p, row, std::min(rows, p.m - row), col, std::min(cols, p.n - col)});
    }
    return tasks;
}

}  // namespace

void run_gemms(const std::vector<GemmProblem>& problems, SummationOrder order) {
    double flops = 0;
    int64_t floats_a = 0, floats_b = 0, scales_a = 0, scales_b = 0;
    for (const GemmProblem& p : problems) {
        const Blocks blocks = blocks_of(p, order);
        const int64_t rows = rows_per_tile(p.k),
                      cols = std::min(cols_per_task(p.k), round_up(p.n, kTileCols));
        flops += 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
        floats_a = std::max(floats_a, rows * (p.k + kRowPadding));
        floats_b = std::max(floats_b, cols * p.k);
        scales_a = std::max(scales_a, rows * blocks.num_scale_blocks);
        scales_b = std::max(scales_b, cols * blocks.num_scale_blocks);
    }
    const int64_t floats_tiles = kMaxRowsA * kMaxColsB;
    const int64_t floats_each =
        round_up(floats_a + floats_b + scales_a + scales_b + 2 * floats_tiles, kTileCols);

    const int64_t max_threads = flops >= kParallelFlops ? omp_get_max_threads() : 1;
    const std::vector<Task> tasks = tasks_of(problems, max_threads);
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    const int64_t num_threads = std::clamp<int64_t>(num_tasks, 1, max_threads);
    const auto memory =
        std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(num_threads * floats_each));
#pragma omp parallel num_threads(static_cast <int>(num_threads))
    {
        Scratch scratch{};
        float* next = memory.get() + omp_get_thread_num() * floats_each;
        const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
        scratch.tiles[0] = take(floats_tiles);
        scratch.tiles[1] = take(floats_tiles);
        scratch.b = take(floats_b);
        scratch.a = take(floats_a);
        scratch.scales_a = take(scales_a);
        scratch.scales_b = take(scales_b);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; ++i) run_task(tasks[static_cast<std::size_t>(i)], order, scratch);
    }
}

}  // namespace fp8flow::reference
