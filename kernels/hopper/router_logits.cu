// The router's projection and its gradients on the GPU: fp32 fma over the contraction in ascending order, one accumulator an output, so
// the bits are the reference's. No tensor cores and no split of the contraction: both would round elsewhere.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;   // outputs of a CTA along m and n
constexpr int kDepth = 32;  // terms in shared memory at a time
constexpr int kPitch = kTile + 4;
constexpr int kPerThread = 4;  // outputs of a thread along m and n

// A matrix operand as rows (m or n) by terms (k). Row-contiguous in k: element (r, k) at r * pitch + k; otherwise at k * pitch + r.
struct Operand {
    const void* data;
    DType dtype;
    int64_t rows, pitch;
    bool vectorised;
};

struct ProductArgs {
    Operand a, b;  // a: m, b: n
    int64_t terms;
    void* out;  // [m, n]
    DType out_dtype;
    const void* addend;  // added to the finished sum, in fp32; may be out
    DType addend_dtype;
    int64_t tiles_m, tiles_n;
};

// This thread's eight elements of a tile of kTile rows by kDepth terms; zero outside.
template <bool kAlongTerms>
__device__ __forceinline__ void load_tile(const Operand& from, int64_t first_row, int64_t first_term,
                                          int64_t terms, float (&v)[kVector]) {
    const int thread = static_cast<int>(threadIdx.x);
    if (kAlongTerms) {  // a thread reads eight terms of one row; the threads of a warp read 32 rows
        const int64_t row = first_row + thread % kTile, term = first_term + thread / kTile * kVector;
        load_up_to_8(from.data, from.dtype, row * from.pitch + term, row < from.rows ? terms - term : 0,
                     from.vectorised, v);
    } else {  // a thread reads eight rows of one term
        const int64_t row = first_row + thread % kVector * kVector, term = first_term + thread / kVector;
        load_up_to_8(from.data, from.dtype, term * from.pitch + row, term < terms ? from.rows - row : 0,
                     from.vectorised, v);
    }
}
template <bool kAlongTerms>
__device__ __forceinline__ void store_tile(float (&tile)[kDepth][kPitch], const float (&v)[kVector]) {
    const int thread = static_cast<int>(threadIdx.x);
    if (kAlongTerms) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) tile[thread / kTile * kVector + j][thread % kTile] = v[j];
    } else {
        float4* to = reinterpret_cast<float4*>(&tile[thread / kVector][thread % kVector * kVector]);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}
static_assert(kTile * kDepth == kThreads * kVector);

__device__ __forceinline__ void add_term(const float (&a)[kDepth][kPitch], const float (&b)[kDepth][kPitch],
                                         int k, int m, int n, float (&sum)[kPerThread][kPerThread]) {
    const float4 va = *reinterpret_cast<const float4*>(&a[k][m]);
    const float4 vb = *reinterpret_cast<const float4*>(&b[k][n]);
    const float x[kPerThread] = {va.x, va.y, va.z, va.w}, y[kPerThread] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] = fma_float(x[i], y[j], sum[i][j]);
}

// out[m, n] = sum over k of a(m, k) * b(n, k), k ascending. 2 m n k FLOPs at fp32 rate; each operand is read once per 64 outputs of the
// other side. A CTA owns a 64 x 64 tile, a thread 4 x 4 outputs; tiles of 32 terms go global -> registers (one tile ahead) -> shared
// memory. Two barriers a tile: after the writes, and before the next writes; loop bounds are the same for all threads. The last terms are
// not padded into the sums. One accumulator an output, one writer: deterministic.
template <bool kAAlongTerms, bool kBAlongTerms>
__global__ __launch_bounds__(kThreads) void product_kernel(const ProductArgs args) {
    __shared__ __align__(16) float a_tile[kDepth][kPitch];
    __shared__ __align__(16) float b_tile[kDepth][kPitch];
    const int thread = static_cast<int>(threadIdx.x);
    const int m = thread / 16 * kPerThread, n = thread % 16 * kPerThread;
    for (int64_t item = blockIdx.x; item < args.tiles_m * args.tiles_n; item += gridDim.x) {
        const int64_t first_m = item / args.tiles_n * kTile, first_n = item % args.tiles_n * kTile;
        float sum[kPerThread][kPerThread] = {};
        float a[kVector], b[kVector];
        load_tile<kAAlongTerms>(args.a, first_m, 0, args.terms, a);
        load_tile<kBAlongTerms>(args.b, first_n, 0, args.terms, b);
        for (int64_t start = 0; start < args.terms; start += kDepth) {
            store_tile<kAAlongTerms>(a_tile, a);
            store_tile<kBAlongTerms>(b_tile, b);
            __syncthreads();
            load_tile<kAAlongTerms>(args.a, first_m, start + kDepth, args.terms, a);
            load_tile<kBAlongTerms>(args.b, first_n, start + kDepth, args.terms, b);
            if (args.terms - start >= kDepth) {
#pragma unroll 8
                for (int k = 0; k < kDepth; ++k) add_term(a_tile, b_tile, k, m, n, sum);
            } else {
                const int left = static_cast<int>(args.terms - start);
#pragma unroll 1
                for (int k = 0; k < left; ++k) add_term(a_tile, b_tile, k, m, n, sum);
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
            for (int j = 0; j < kPerThread; ++j) {
                const int64_t row = first_m + m + i, column = first_n + n + j;
                if (row >= args.a.rows || column >= args.b.rows) continue;
                const int64_t at = row * args.b.rows + column;
                float value = sum[i][j];
                if (args.addend != nullptr) value += load_float(args.addend, args.addend_dtype, at);
                store_float(args.out, args.out_dtype, at, value);
            }
        }
    }
}

Operand along_terms(const TensorView& view) {  // [rows, terms]
    return {view.data, view.dtype, view.dim(0), view.dim(1), is_vectorisable(view.data, view.dim(1))};
}
Operand along_rows(const TensorView& view) {  // [terms, rows]
    return {view.data, view.dtype, view.dim(1), view.dim(1), is_vectorisable(view.data, view.dim(1))};
}

template <bool kAAlongTerms, bool kBAlongTerms>
void launch_product(const Operand& a, const Operand& b, int64_t terms, const TensorView& out,
                    const TensorView& addend, const Launch& launch, const char* op) {
    if (out.numel() == 0) return;
    const ProductArgs args{.a = a,
                           .b = b,
                           .terms = terms,
                           .out = out.data,
                           .out_dtype = out.dtype,
                           .addend = addend ? addend.data : nullptr,
                           .addend_dtype = addend.dtype,
                           .tiles_m = ceil_div(a.rows, kTile),
                           .tiles_n = ceil_div(b.rows, kTile)};
    constexpr int kCtasPerSm = 4;
    product_kernel<kAAlongTerms, kBAlongTerms>
        <<<grid_for(args.tiles_m * args.tiles_n, launch, kCtasPerSm), kThreads, 0, stream_of(launch)>>>(args);
    check_launch(op);
}

}  // namespace

void HopperOps::do_router_logits(const op::RouterLogits& args, const Launch& launch) {
    launch_product<true, true>(along_terms(args.x), along_terms(args.weight), args.x.dim(1), args.logits, {},
                               launch, "router_logits");
}

void HopperOps::do_router_logits_backward(const op::RouterLogitsBackward& args, const Launch& launch) {
    const int64_t tokens = args.x.dim(0), experts = args.weight.dim(0);
    launch_product<true, false>(along_terms(args.dlogits), along_rows(args.weight), experts, args.dx,
                                args.dx_in, launch, "router_logits_backward: dx");
    const TensorView old = args.dweight_mode == Gradient::accumulate ? args.dweight : TensorView{};
    launch_product<false, false>(along_rows(args.dlogits), along_rows(args.x), tokens, args.dweight, old,
                                 launch, "router_logits_backward: dweight");
}

}  // namespace fp8flow
