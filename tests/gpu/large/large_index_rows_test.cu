// SPDX-License-Identifier: MIT
// Row movers, embedding, cross-entropy, element-wise operations and grouped GEMMs on tensors with more than
// 2^31 elements.
#include "tests/support/large_index.h"

namespace fp8flow::test {
namespace {

TEST_F(LargeIndex, PermuteAndPad) {
    constexpr int64_t kTokens = 40;
    HostTensor source(DType::i32, {kTotal}), far_source(DType::i32, {kTotal});
    for (int64_t r = 0; r < kTotal; ++r) {
        const int32_t token = groups_.is_pad(r) ? -1 : static_cast<int32_t>(r * 7 % kTokens);
        source.as<int32_t>()[r] = token;
        far_source.as<int32_t>()[r] = token < 0 ? -1 : static_cast<int32_t>(kBase) + token;
    }
    const TensorView large_source = routed(DType::i32, {kCapacity});
    put(large_source, kBase, source);

    const HostScaled src(DType::e4m3, {kTokens, kCols}, ScaleLayout::vec128_wire),
        dst(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128);
    fill_uniform(src.data, 1, -400, 400);
    fill_pow2(src.scales, 2, -10, 10);
    const ScaledTensor large = large_rows(kCols);
    gpu_.permute_pad({.src = {upload(src.data), upload(src.scales), src.layout},
                      .row_source = large_source,
                      .groups = gpu_groups_,
                      .dst = large});
    cpu_.permute_pad({.src = src, .row_source = source, .groups = groups_, .dst = dst});
    expect_same_rows(large.data, dst.data, kBase, "codes");
    expect_same_stretches(large.scales, dst.scales, "scales");

    // plain rows, also from beyond element 2^31
    const HostTensor tokens(DType::bf16, {kTokens, kCols}), moved(DType::bf16, {kTotal, kCols});
    fill_normal(tokens, 3);
    const TensorView far_tokens = buffer(DType::bf16, {kBase + kTokens, kCols}),
                     large_moved = routed(DType::bf16, {kCapacity, kCols});
    put_rows(far_tokens, tokens, kBase);
    put(large_source, kBase, far_source);
    gpu_.permute_pad({.src = {.data = far_tokens, .scales = {}},
                      .row_source = large_source,
                      .groups = gpu_groups_,
                      .dst = {.data = large_moved, .scales = {}}});
    cpu_.permute_pad({.src = {.data = tokens, .scales = {}},
                      .row_source = source,
                      .groups = groups_,
                      .dst = {.data = moved, .scales = {}}});
    expect_same_rows(large_moved, moved, kBase, "plain rows");

    // unpermute to rows beyond element 2^31; the rows before have no source
    HostTensor recv_rows(DType::i32, {kTokens, 2});
    for (int64_t t = 0; t < kTokens; ++t) {
        recv_rows.as<int32_t>()[2 * t] = static_cast<int32_t>(t * 3);
        recv_rows.as<int32_t>()[2 * t + 1] = t % 3 == 0 ? -1 : static_cast<int32_t>(256 + t * 4);
    }
    const HostTensor num_rows = HostTensor::of<int64_t>({kTokens}),
                     far_num_rows = HostTensor::of<int64_t>({kBase + kTokens}),
                     back(DType::bf16, {kTokens, kCols});
    const TensorView far_recv_rows = buffer(DType::i32, {kBase + kTokens, 2});
    gpu_.device().fill(far_recv_rows.data, 0xFF, static_cast<std::size_t>(far_recv_rows.bytes()));
    put_rows(far_recv_rows, recv_rows, kBase);
    gpu_.unpermute_unpad({.src = large_moved,
                          .recv_rows = far_recv_rows,
                          .num_rows = upload(far_num_rows),
                          .row_prob = {},
                          .dst = far_tokens});
    cpu_.unpermute_unpad(
        {.src = moved, .recv_rows = recv_rows, .num_rows = num_rows, .row_prob = {}, .dst = back});
    expect_same_rows(far_tokens, back, kBase, "back");

    const HostTensor drow_prob(DType::f32, {kTotal});
    const TensorView large_drow_prob = routed(DType::f32, {kCapacity});
    gpu_.unpermute_probs_backward({.ddst = far_tokens,
                                   .src = large_moved,
                                   .row_source = large_source,
                                   .groups = gpu_groups_,
                                   .drow_prob = large_drow_prob});
    cpu_.unpermute_probs_backward(
        {.ddst = back, .src = moved, .row_source = source, .groups = groups_, .drow_prob = drow_prob});
    expect_same(large_drow_prob, kBase, drow_prob, 0, kTotal, "drow_prob");
}

TEST_F(LargeIndex, PadAndUnpadRows) {
    const GroupsFixture tight({130, 0, 200}, 1);
    RowGroups gpu_tight = tight;
    gpu_tight.counts = upload(gpu_tight.counts);
    gpu_tight.offsets = upload(gpu_tight.offsets);
    const HostScaled src(DType::e4m3, {tight.total(), kCols}, ScaleLayout::vec128),
        dst(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128);
    const HostTensor back(DType::e4m3, {tight.total(), kCols});
    fill_uniform(src.data, 1, -400, 400);
    fill_uniform(src.scales, 2, 0.01, 3);
    const ScaledTensor large_src = large_rows(kCols), large_dst = large_rows(kCols);
    put_rows(large_src.data, src.data, kBase);
    put_stretches(large_src.scales, src.scales);
    gpu_.pad_rows({.src = large_src, .src_groups = gpu_tight, .dst_groups = gpu_groups_, .dst = large_dst});
    cpu_.pad_rows({.src = src, .src_groups = tight, .dst_groups = groups_, .dst = dst});
    expect_same_rows(large_dst.data, dst.data, kBase, "codes");
    expect_same_stretches(large_dst.scales, dst.scales, "scales");
    gpu_.unpad_rows(
        {.src = large_dst.data, .src_groups = gpu_groups_, .dst_groups = gpu_tight, .dst = large_src.data});
    cpu_.unpad_rows({.src = dst.data, .src_groups = groups_, .dst_groups = tight, .dst = back});
    expect_same_rows(large_src.data, back, kBase, "back");
}

TEST_F(LargeIndex, EmbeddingAndCrossEntropy) {
    constexpr int64_t kLast = 40, kRows = kBase + kLast, kVocab = 61;
    HostTensor ids(DType::i32, {kLast}), table(DType::bf16, {kVocab, kCols}), y(DType::bf16, {kLast, kCols});
    for (int64_t t = 0; t < kLast; ++t) ids.as<int32_t>()[t] = static_cast<int32_t>(t * 17 % kVocab);
    fill_normal(table, 1);
    const TensorView large_ids = buffer(DType::i32, {kRows}), large_y = buffer(DType::bf16, {kRows, kCols});
    gpu_.device().fill(large_ids.data, 0, static_cast<std::size_t>(large_ids.bytes()));
    put(large_ids, kBase, ids);
    gpu_.embedding({.ids = large_ids, .table = upload(table), .y = large_y});
    cpu_.embedding({.ids = ids, .table = table, .y = y});
    expect_same_rows(large_y, y, kBase, "y");

    const HostTensor logits(DType::f32, {kLast, kCols}), loss(DType::f32, {kLast}),
        dlogits(DType::bf16, {kLast, kCols});
    fill_normal(logits, 2, 4.0);
    const TensorView large_logits = buffer(DType::f32, {kRows, kCols}),
                     large_loss = buffer(DType::f32, {kRows});
    gpu_.device().fill(large_logits.data, 0, static_cast<std::size_t>(large_logits.bytes()));
    put_rows(large_logits, logits, kBase);
    gpu_.cross_entropy({.logits = large_logits,
                        .labels = large_ids,
                        .vocab_size = kCols - 3,
                        .grad_scale = 0.5f,
                        .loss = large_loss,
                        .dlogits = large_y});
    cpu_.cross_entropy({.logits = logits,
                        .labels = ids,
                        .vocab_size = kCols - 3,
                        .grad_scale = 0.5f,
                        .loss = loss,
                        .dlogits = dlogits});
    expect_same(large_loss, kBase, loss, 0, kLast, "loss");
    expect_same_rows(large_y, dlogits, kBase, "dlogits");
}

TEST_F(LargeIndex, PackedProjectionAndRope) {
    constexpr int64_t kHeads = 64, kKvHeads = 32, kDepth = 128, kColumns = (kHeads + 2 * kKvHeads) * kDepth,
                      kLength = 64, kBefore = kBase * kCols / kColumns, kRows = kBefore + kLength;
    const HostTensor qkv(DType::bf16, {kLength, kColumns}), merged(DType::bf16, {kLength, kColumns}),
        q(DType::bf16, {kLength, kHeads, kDepth}), k(DType::bf16, {kLength, kKvHeads, kDepth}),
        v(DType::bf16, {kLength, kKvHeads, kDepth}), table(DType::f32, {kLength, kDepth / 2, 2});
    fill_normal(qkv, 1);
    fill_uniform(table, 2, -1, 1);
    const TensorView large_qkv = buffer(DType::bf16, {kRows, kColumns}),
                     large_q = buffer(DType::bf16, {kRows, kHeads, kDepth}),
                     large_k = buffer(DType::bf16, {kRows, kKvHeads, kDepth}),
                     large_v = buffer(DType::bf16, {kRows, kKvHeads, kDepth});
    gpu_.device().fill(large_qkv.data, 0x3F, static_cast<std::size_t>(large_qkv.bytes()));
    put_rows(large_qkv, qkv, kBefore);
    gpu_.split_qkv({.qkv = large_qkv, .q = large_q, .k = large_k, .v = large_v});
    cpu_.split_qkv({.qkv = qkv, .q = q, .k = k, .v = v});
    expect_same(large_q, kBefore * kHeads * kDepth, q, 0, q.numel(), "q");
    expect_same(large_k, kBefore * kKvHeads * kDepth, k, 0, k.numel(), "k");
    expect_same(large_v, kBefore * kKvHeads * kDepth, v, 0, v.numel(), "v");

    // all columns as heads, rotated in place; then q, k and v over them
    const auto as_heads = [&](TensorView t) { return t.reshape({t.dim(0), kColumns / kDepth, kDepth}); };
    gpu_.rope({.table = upload(table), .x = as_heads(large_qkv)});
    cpu_.rope({.table = table, .x = as_heads(qkv)});
    expect_same_rows(large_qkv, qkv, kBefore, "rotated");
    gpu_.merge_qkv({.q = large_q, .k = large_k, .v = large_v, .qkv = large_qkv});
    cpu_.merge_qkv({.q = q, .k = k, .v = v, .qkv = merged});
    expect_same_rows(large_qkv, merged, kBefore, "merged");
}

constexpr int64_t kTail = 4001, kCount = kBase * kCols + kTail;  // elements; those before the tail are zeros

TEST_F(LargeIndex, ElementWise) {
    HostTensor a(DType::bf16, {kTail}), b(DType::bf16, {kTail}), y(DType::bf16, {kTail}),
        c(DType::f16, {kTail});
    fill_normal(a, 1);
    fill_normal(b, 2);
    const TensorView large_a = buffer(DType::bf16, {kCount}), large_b = buffer(DType::bf16, {kCount}),
                     large_c = buffer(DType::f16, {kCount});
    for (const TensorView& t : {large_a, large_b, large_c}) {
        gpu_.device().fill(t.data, 0xFF, static_cast<std::size_t>(t.bytes()));
        gpu_.zero({.y = t});
        expect_same(t, kCount - 1, HostTensor::of<Bf16>({Bf16{0}}), 0, 1, "zero");
    }
    put(large_a, kCount - kTail, a);
    put(large_b, kCount - kTail, b);
    gpu_.cast({.x = large_a, .y = large_c});
    cpu_.cast({.x = a, .y = c});
    expect_same(large_c, kCount - kTail, c, 0, kTail, "cast");
    gpu_.add({.a = large_a, .b = large_b, .y = large_a});
    cpu_.add({.a = a, .b = b, .y = y});
    expect_same(large_a, kCount - kTail, y, 0, kTail, "a + b");

    HostTensor bad(DType::bf16, {1});
    set(bad, 0, std::nan(""));
    put(large_a, kCount - 3, bad);
    const HostTensor zero = HostTensor::of<int64_t>({0}), none = HostTensor::of<int64_t>({-1});
    const TensorView count = upload(zero), first = upload(none);
    gpu_.count_non_finite({.x = large_a, .count = count, .first = first});
    expect_same(count, 0, HostTensor::of<int64_t>({1}), 0, 1, "count");
    expect_same(first, 0, HostTensor::of<int64_t>({kCount - 3}), 0, 1, "first");
}

TEST_F(LargeIndex, AdamWAndNorm) {
    HostTensor grad(DType::f32, {kTail}), master(DType::f32, {kTail}), m(DType::f32, {kTail}),
        v(DType::f32, {kTail}), copy(DType::bf16, {kTail});
    fill_normal(grad, 1, 1e-3);
    fill_normal(master, 2, 0.02);
    fill_normal(m, 3, 1e-4);
    fill_uniform(v, 4, 0, 1e-6);
    const HostTensor schedule = HostTensor::of<float>({1e-3f, 0.1f, 0.05f}),
                     one = HostTensor::of<float>({0.5f}), sum = HostTensor::of<float>({0.0f});
    TensorView large[4];
    const HostTensor* small[4] = {&grad, &master, &m, &v};
    for (int i = 0; i < 4; ++i) {
        large[i] = buffer(DType::f32, {kCount});
        gpu_.device().fill(large[i].data, 0, static_cast<std::size_t>(large[i].bytes()));
        put(large[i], kCount - kTail, *small[i]);
    }
    const TensorView large_copy = buffer(DType::bf16, {kCount}), large_sum = upload(sum);
    // zeros add nothing, and the tail begins at a multiple of the blocks in which squares are summed
    gpu_.norm_squared({.x = large[0], .sum = large_sum});
    cpu_.norm_squared({.x = grad, .sum = sum});
    expect_same(large_sum, 0, sum, 0, 1, "norm squared");
    op::AdamW args{.grad = grad,
                   .schedule = schedule,
                   .grad_scale = one,
                   .status = {},
                   .master = master,
                   .m = m,
                   .v = v,
                   .copy = copy};
    op::AdamW device = args;
    device.grad = large[0];
    device.schedule = upload(schedule);
    device.grad_scale = upload(one);
    device.master = large[1];
    device.m = large[2];
    device.v = large[3];
    device.copy = large_copy;
    gpu_.adamw(device);
    cpu_.adamw(args);
    for (int i = 1; i < 4; ++i) expect_same(large[i], kCount - kTail, *small[i], 0, kTail, "master, m or v");
    expect_same(large_copy, kCount - kTail, copy, 0, kTail, "copy");
}

// Rows beyond element 2^31 give the bits that the same rows give in small buffers on the same GPU.
TEST_F(LargeIndex, GroupedGemms) {
    constexpr int64_t kPool = int64_t{1} << 20;
    // FP8 values, used repeatedly: these operands are too large to draw
    const HostTensor pool(DType::e4m3, {kPool});
    fill_normal(pool, 1, 8.0);
    const auto fill_fp8 = [&](const TensorView& fp8) {
        for (int64_t at = 0; at < fp8.numel(); at += kPool)
            put(fp8, at, pool.view().slice(0, std::min(kPool, fp8.numel() - at)));
    };
    const auto copy_of = [&](const TensorView& device) {
        HostTensor host(device.dtype, device.dims, device.rank);
        gpu_.device().copy_out(host.view().data, device.data, static_cast<std::size_t>(device.bytes()));
        return host;
    };
    const int64_t G = groups_.num_groups();
    for (const GemmBackend backend : {GemmBackend::native, GemmBackend::simt}) {
        SCOPED_TRACE(backend == GemmBackend::simt ? "simt" : "native");
        gpu_.choose_kernels({.gemm = backend});
        {
            const HostScaled a(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128);
            for (int64_t at = 0; at < a.data.numel(); at += kPool)
                std::memcpy(a.data.view().bytes_ptr() + at, pool.view().data,
                            static_cast<std::size_t>(kPool));
            fill_pow2(a.scales, 2, -6, 0);
            const HostTensor b_scales(DType::f32, {G, kCols / kBlock, kCols / kBlock});
            fill_pow2(b_scales, 3, -6, 0);
            const ScaledTensor b = {buffer(DType::e4m3, {G, kCols, kCols}), upload(b_scales),
                                    ScaleLayout::block128},
                               large = large_rows(kCols),
                               small = {upload(a.data), upload(a.scales), a.layout};
            fill_fp8(b.data);
            put_rows(large.data, a.data, kBase);
            put_stretches(large.scales, a.scales);
            const TensorView large_d = routed(DType::bf16, {kCapacity, kCols}),
                             d = buffer(DType::bf16, {kTotal, kCols});
            gpu_.grouped_gemm({.a = large, .b = b, .groups = gpu_groups_, .d = large_d});
            gpu_.grouped_gemm({.a = small, .b = b, .groups = gpu_groups_, .d = d});
            expect_same_rows(large_d, copy_of(d), kBase, "d");
        }
        {
            constexpr int64_t kWidth = 128;
            const auto turned = [&](int64_t dim, int64_t columns) {
                return ScaledTensor{buffer(DType::e4m3, {dim, columns}),
                                    buffer(DType::f32, {columns / kBlock, dim / kBlock}),
                                    ScaleLayout::tile128};
            };
            ScaledTensor large[2], small[2];
            int64_t dims[2] = {kCols, kWidth};
            for (int i = 0; i < 2; ++i) {
                large[i] = turned(dims[i], kCapacity);
                large[i].data.row_base = base_;
                small[i] = turned(dims[i], kTotal);
                fill_fp8(small[i].data);
                put_stretches(large[i].data, copy_of(small[i].data));
                const HostTensor scales(DType::f32, {kTotal / kBlock, dims[i] / kBlock});
                fill_pow2(scales, 4, -6, 0);
                put(small[i].scales, 0, scales);
                put_rows(large[i].scales, scales, kBase / kBlock);
            }
            const TensorView large_dw = buffer(DType::f32, {G, kCols, kWidth}),
                             dw = buffer(DType::f32, {G, kCols, kWidth});
            gpu_.grouped_gemm_wgrad({.dy = large[0], .x = large[1], .groups = gpu_groups_, .dw = large_dw});
            gpu_.grouped_gemm_wgrad({.dy = small[0], .x = small[1], .groups = gpu_groups_, .dw = dw});
            expect_same(large_dw, 0, copy_of(dw), 0, dw.numel(), "dw");
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
