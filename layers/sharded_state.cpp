// SPDX-License-Identifier: MIT
// State of the optimizer that ranks share (use_distributed_optimizer): who has which slice, and how what one
// rank wrote comes to all. Source: ZeRO stage 1 (Rajbhandari et al. 2019), Megatron-LM's distributed
// optimizer.
#include "layers/parameter.h"

#include <algorithm>

namespace fp8flow {

namespace {

constexpr int64_t kUnit = 64;  // elements; slices of BF16 and of FP32 begin at whole 128 bytes

TensorView flat(const TensorView& whole) { return make_view(whole.data, whole.dtype, {whole.numel()}); }

}  // namespace

StateSlice state_slice(int64_t numel, int64_t rank, int64_t size) {
    const int64_t units = ceil_div(numel, kUnit);
    const auto begin = [&](int64_t r) { return std::min(numel, units * r / size * kUnit); };
    return {begin(rank), begin(rank + 1) - begin(rank)};
}

int64_t Parameter::numel() const {
    int64_t n = 1;
    for (int i = 0; i < spec.rank; ++i) n *= spec.shape[i];
    return n;
}

TensorView Parameter::part_here(const TensorView& whole) const {
    return flat(whole).slice(slice.first, slice.count);
}

// What others have is 0 here, and a sum of integers carries the bits of all to all: there is one rank whose
// word is not 0. The last word may hold padding, which is 0 everywhere.
void ParameterStore::gather(Exchange& exchange, const Parameter& p, const TensorView& whole,
                            const Launch& launch) {
    const int64_t end = p.slice.first + p.slice.count;
    const TensorView values = flat(whole);
    const int64_t words = ceil_div(values.bytes(), size_of(DType::i64));
    const auto clear = [&](uint8_t* begin, int64_t bytes) {
        if (bytes > 0) ops_.device().fill(begin, 0, static_cast<size_t>(bytes), launch.stream);
    };
    const int64_t element = size_of(values.dtype);
    clear(values.bytes_ptr(), p.slice.first * element);
    clear(values.bytes_ptr() + end * element, words * size_of(DType::i64) - end * element);
    exchange.all_reduce(Reduce::sum, p.spec.expert ? Ranks::expert_replicas : Ranks::world,
                        make_view(values.data, DType::i64, {words}), launch);
}

void ParameterStore::gather_master(Exchange& exchange, const Parameter& p, const TensorView& whole,
                                   const Launch& launch) {
    const TensorView here = p.part_here(whole);
    if (here.numel() > 0)
        ops_.device().copy(here.data, p.master.data, static_cast<size_t>(here.bytes()), launch.stream);
    gather(exchange, p, whole, launch);
}

void ParameterStore::gather_copies(Exchange& exchange, Parameter& p, const Launch& launch) {
    if (!p.fprop) {
        if (p.plain) gather(exchange, p, p.plain, launch);
        return;
    }
    const int64_t* s = p.spec.shape;
    const TensorView master = gathered_.slice(0, p.numel()).reshape({s[0], s[1], s[2]});
    gather_master(exchange, p, master, launch);
    write_copies(p, master, launch);
}

void ParameterStore::write_all_copies(Exchange& exchange) {
    for (Parameter& p : parameters_) {
        if (!p.is_sharded()) {
            write_copies(p);
            continue;
        }
        if (p.plain && !p.fprop && p.slice.count > 0) ops_.cast({.x = p.master, .y = p.part_here(p.plain)});
        gather_copies(exchange, p);
    }
}

}  // namespace fp8flow
