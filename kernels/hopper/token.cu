// The two ends of the model on the GPU: embedding, its gradient, cross-entropy. Bit-equal to the reference. Token ids cannot be reported
// from a kernel: the data loader checks them; here an id outside the vocabulary becomes NaN (a step that is then skipped), never an address.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32;
constexpr uint32_t kNanBits = 0x7FC00000u;

// ---- embedding ------------------------------------------------------------------------------------------------------------------
// Moves: one table row in, one activation row out a token. One warp a token, eight elements a thread and turn. Element-wise.
constexpr int kRowWarps = 8;
__global__ __launch_bounds__(kRowWarps* kWarpSize) void embedding_kernel(const int32_t* ids, int64_t tokens,
                                                                         DeviceView table, DeviceView y,
                                                                         bool vectorised) {
    const int64_t vocab = table.dims[0], hidden = table.dims[1];
    const int lane = threadIdx.x % kWarpSize;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarpSize; t < tokens;
         t += static_cast<int64_t>(gridDim.x) * kRowWarps) {
        const int64_t id = ids[t];
        const bool known = id >= 0 && id < vocab;
        for (int64_t column = lane * kVector; column < hidden; column += kWarpSize * kVector) {
            float values[kVector];
            load_up_to_8(table.data, table.dtype, (known ? id : 0) * hidden + column, hidden - column,
                         vectorised, values);
            if (!known) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) values[j] = bits_float(kNanBits);
            }
            store_up_to_8(y.data, y.dtype, t * hidden + column, hidden - column, vectorised, values);
        }
    }
}

// next[t] = the next position with the id of t, or -1; marks that position as having a predecessor. One thread a token; ids pass
// through shared memory a tile at a time, from the CTA's own tokens onwards, until all threads have found theirs. Two barriers a tile,
// outside of divergent code. Each position has one predecessor at most, so every word has one writer.
constexpr int kLinkThreads = 256;
__global__ __launch_bounds__(kLinkThreads) void link_tokens_kernel(const int32_t* ids, int tokens,
                                                                   int32_t* next, uint8_t* has_previous) {
    __shared__ int32_t tile[kLinkThreads];
    for (int own = static_cast<int>(blockIdx.x) * kLinkThreads; own < tokens;
         own += static_cast<int>(gridDim.x) * kLinkThreads) {
        const int t = own + static_cast<int>(threadIdx.x);
        const int32_t id = t < tokens ? ids[t] : -1;
        int found = -1;
        for (int start = own; start < tokens; start += kLinkThreads) {
            const int at = start + static_cast<int>(threadIdx.x);
            __syncthreads();  // the last tile is read
            tile[threadIdx.x] = at < tokens ? ids[at] : -1;
            if (__syncthreads_count(t < tokens && found < 0) == 0) break;
            if (t >= tokens || found >= 0) continue;
            const int end = tokens - start < kLinkThreads ? tokens - start : kLinkThreads;
            for (int i = start > t ? 0 : t + 1 - start; i < end; ++i) {
                if (tile[i] != id) continue;
                found = start + i;
                break;
            }
        }
        if (t >= tokens) continue;
        next[t] = found;
        if (found >= 0) has_previous[found] = 1;
    }
}

// dtable[id] += the gradient rows of its tokens. Moves: dy once, the touched table rows in and out once. One CTA an (id's first token,
// 1024 columns); a thread owns eight columns and follows the list of the id's tokens, which ascends: the reference's order, one writer an
// element. No barriers. An id with many tokens is a long list; the other CTAs run beside it.
constexpr int kGradThreads = 128;
constexpr int kGradColumns = kGradThreads * kVector;
__global__ __launch_bounds__(kGradThreads) void embedding_backward_kernel(const int32_t* ids,
                                                                          const int32_t* next,
                                                                          const uint8_t* has_previous,
                                                                          DeviceView dy, float* dtable,
                                                                          int64_t vocab, bool vectorised) {
    const int64_t tokens = dy.dims[0], hidden = dy.dims[1];
    const int64_t column_tiles = (hidden + kGradColumns - 1) / kGradColumns;
    for (int64_t item = blockIdx.x; item < tokens * column_tiles; item += gridDim.x) {
        const int64_t first = item / column_tiles, id = ids[first];
        const int64_t column = item % column_tiles * kGradColumns + threadIdx.x * kVector;
        if (has_previous[first] != 0 || id < 0 || id >= vocab || column >= hidden) continue;
        float sum[kVector];
        load_up_to_8(dtable, DType::f32, id * hidden + column, hidden - column, vectorised, sum);
        for (int64_t t = first; t >= 0; t = next[t]) {
            float values[kVector];
            load_up_to_8(dy.data, dy.dtype, t * hidden + column, hidden - column, vectorised, values);
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] += values[j];
        }
        store_up_to_8(dtable, DType::f32, id * hidden + column, hidden - column, vectorised, sum);
    }
}

// ---- cross-entropy --------------------------------------------------------------------------------------------------------------
struct CrossEntropyArgs {
    const float* logits;
    const int32_t* labels;
    float* loss;
    void* dlogits;
    DType dlogits_dtype;
    int64_t tokens, columns, vocab;
    float grad_scale;
};

constexpr int kLossThreads = 256;
constexpr int kLossTile = 2048;  // elements whose exponentials wait in shared memory

// Moves: a row of logits three times (of which two usually hit the L2), a row of gradients once. One CTA a token: (1) the largest logit;
// (2) exponentials, a tile at a time into shared memory, from which eight threads add the eight lanes in ascending order: that chain is
// the reference's and it hides behind the other CTAs of the SM; (3) the gradient from recomputed exponentials. Barriers stand around every
// use of shared memory and all threads reach them: loop bounds depend on the token only. Fixed order: deterministic.
__global__ __launch_bounds__(kLossThreads) void cross_entropy_kernel(const CrossEntropyArgs args) {
    __shared__ float tile[kLossTile];
    __shared__ float warp_largest[kLossThreads / kWarpSize];
    __shared__ float row_sum;
    const int thread = static_cast<int>(threadIdx.x);
    for (int64_t t = blockIdx.x; t < args.tokens; t += gridDim.x) {
        const float* row = args.logits + t * args.columns;
        const int64_t label = args.labels[t];
        if (label < 0) {  // ignored; the same branch for all threads
            if (thread == 0) args.loss[t] = 0.0f;
            if (args.dlogits != nullptr)
                for (int64_t i = thread; i < args.columns; i += kLossThreads)
                    store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, 0.0f);
            continue;
        }
        float largest = bits_float(0xFF800000u);
        for (int64_t i = thread; i < args.vocab; i += kLossThreads)
            largest = row[i] > largest ? row[i] : largest;
        for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, mask);
            largest = other > largest ? other : largest;
        }
        if (thread % kWarpSize == 0) warp_largest[thread / kWarpSize] = largest;
        __syncthreads();
        largest = warp_largest[0];
        for (int w = 1; w < kLossThreads / kWarpSize; ++w)
            largest = warp_largest[w] > largest ? warp_largest[w] : largest;

        float lane = 0.0f;
        for (int64_t start = 0; start < args.vocab; start += kLossTile) {
#pragma unroll
            for (int j = 0; j < kLossTile / kLossThreads; ++j) {
                const int64_t i = start + j * kLossThreads + thread;
                tile[j * kLossThreads + thread] = i < args.vocab ? exp_float(row[i] - largest) : 0.0f;
            }
            __syncthreads();
            if (thread < kLaneCount) {
                const int64_t left = args.vocab - start;
                const int end = static_cast<int>(left < kLossTile ? left : kLossTile);
#pragma unroll 16
                for (int i = thread; i < end; i += kLaneCount) lane += tile[i];
            }
            __syncthreads();
        }
        if (thread < kWarpSize) {
            lane = combine_lanes(lane);
            if (thread == 0) {
                const bool known = label < args.vocab;
                row_sum = known ? lane : bits_float(kNanBits);
                args.loss[t] = known ? log_float(lane) + (largest - row[label]) : bits_float(kNanBits);
            }
        }
        __syncthreads();
        const float sum = row_sum;
        if (args.dlogits != nullptr) {
            for (int64_t i = thread; i < args.columns; i += kLossThreads) {
                float p = 0.0f;
                if (i < args.vocab) {
                    p = div_float(exp_float(row[i] - largest), sum);
                    if (i == label) p -= 1.0f;
                    p *= args.grad_scale;
                }
                store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, p);
            }
        }
        __syncthreads();  // warp_largest and row_sum belong to the next token now
    }
}

}  // namespace

void HopperOps::do_embedding(const op::Embedding& args, const Launch& launch) {
    const int64_t tokens = args.y.dim(0), hidden = args.table.dim(1);
    if (tokens == 0 || hidden == 0) return;
    const bool vectorised = is_vectorisable(args.table.data, hidden) && is_vectorisable(args.y.data, hidden);
    embedding_kernel<<<grid_for(ceil_div(tokens, kRowWarps), launch), kRowWarps * kWarpSize, 0,
                       stream_of(launch)>>>(args.ids.as<int32_t>(), tokens, device_view(args.table),
                                            device_view(args.y), vectorised);
    check_launch("embedding");
}

void HopperOps::do_embedding_backward(const op::EmbeddingBackward& args, const Launch& launch) {
    const int64_t tokens = args.dy.dim(0), hidden = args.dtable.dim(1);
    const cudaStream_t stream = stream_of(launch);
    if (args.mode == Gradient::overwrite && args.dtable.numel() > 0)
        check_cuda(
            cudaMemsetAsync(args.dtable.data, 0, static_cast<std::size_t>(args.dtable.bytes()), stream),
            "embedding_backward");
    if (tokens == 0 || hidden == 0) return;
    FP8FLOW_CHECK(tokens <= INT32_MAX - kLinkThreads, "{} tokens: positions must fit 32 bits", tokens);
    int32_t* next = workspace_->partials_for<int32_t>(tokens + ceil_div(tokens, 4));
    uint8_t* has_previous = reinterpret_cast<uint8_t*>(next + tokens);
    check_cuda(cudaMemsetAsync(has_previous, 0, static_cast<std::size_t>(tokens), stream),
               "embedding_backward");
    const int32_t* ids = args.ids.as<int32_t>();
    link_tokens_kernel<<<grid_for(ceil_div(tokens, kLinkThreads), launch), kLinkThreads, 0, stream>>>(
        ids, static_cast<int>(tokens), next, has_previous);
    const bool vectorised =
        is_vectorisable(args.dy.data, hidden) && is_vectorisable(args.dtable.data, hidden);
    embedding_backward_kernel<<<grid_for(tokens * ceil_div(hidden, kGradColumns), launch, 16), kGradThreads,
                                0, stream>>>(ids, next, has_previous, device_view(args.dy),
                                             args.dtable.as<float>(), args.dtable.dim(0), vectorised);
    check_launch("embedding_backward");
}

void HopperOps::do_cross_entropy(const op::CrossEntropy& args, const Launch& launch) {
    const CrossEntropyArgs kernel_args{.logits = args.logits.as<float>(),
                                       .labels = args.labels.as<int32_t>(),
                                       .loss = args.loss.as<float>(),
                                       .dlogits = args.dlogits ? args.dlogits.data : nullptr,
                                       .dlogits_dtype = args.dlogits.dtype,
                                       .tokens = args.logits.dim(0),
                                       .columns = args.logits.dim(1),
                                       .vocab = args.vocab_size,
                                       .grad_scale = args.grad_scale};
    if (kernel_args.tokens == 0) return;
    cross_entropy_kernel<<<grid_for(kernel_args.tokens, launch), kLossThreads, 0, stream_of(launch)>>>(
        kernel_args);
    check_launch("cross_entropy");
}

}  // namespace fp8flow
