// SPDX-License-Identifier: MIT
// Initial values by name and global index, so that every rank layout starts equal; the working copies of each
// recipe.
#include "layers/parameter.h"

#include "kernels/core/random.h"

#include <vector>

namespace fp8flow {

namespace {

// Drawn by global index, so that an expert's weights do not depend on who holds it.
void write_initial_values(const ParameterSpec& spec, const TensorView& master, uint64_t seed, Ops& ops) {
    switch (spec.init) {
        case Init::normal: {
            const int64_t per_expert = spec.expert ? master.numel() / spec.shape[0] : 0;
            ops.fill_normal({.seed = seed,
                             .stream = fnv1a64(spec.name),
                             .first = spec.first_expert * per_expert,
                             .standard_deviation = spec.init_std,
                             .y = master});
            return;
        }
        case Init::zeros: ops.zero({.y = master}); return;
        case Init::ones: {
            const std::vector<float> ones(static_cast<size_t>(master.numel()), 1.0f);
            ops.device().copy_in(master.data, ones.data(), ones.size() * sizeof(float));
            ops.device().synchronize();  // the source goes out of scope
            return;
        }
    }
}

}  // namespace

Parameter& ParameterStore::add(const ParameterSpec& spec) {
    Parameter& p = parameters_.emplace_back();
    p.spec = spec;
    auto shaped = [&](DType dtype, const char* category) {
        const int64_t* s = spec.shape;
        if (spec.rank == 1) return arena_.tensor(dtype, {s[0]}, category);
        if (spec.rank == 2) return arena_.tensor(dtype, {s[0], s[1]}, category);
        return arena_.tensor(dtype, {s[0], s[1], s[2]}, category);
    };
    p.master = shaped(DType::f32, "master");
    p.m = shaped(DType::f32, "moments");
    p.v = shaped(DType::f32, "moments");
    const WeightFormat& format = spec.format;
    if (format.plain)
        p.plain = spec.plain_dtype == DType::f32 ? p.master : shaped(spec.plain_dtype, "copies");
    if (format.fp8_layout != ScaleLayout::none) {
        FP8FLOW_CHECK(spec.rank == 3, "{} has rank {}", spec.name, spec.rank);
        const int64_t e = spec.shape[0], n = spec.shape[1], k = spec.shape[2];
        p.fprop = arena_.fp8(DType::e4m3, {e, n, k}, format.fp8_layout, "copies");
        p.dgrad = arena_.fp8(DType::e4m3, {e, k, n}, format.fp8_layout, "copies");
    }
    Device& device = ops_.device();
    write_initial_values(spec, p.master, seed_, ops_);
    for (const TensorView& zeroed : {p.m, p.v})
        device.fill(zeroed.data, 0, static_cast<size_t>(zeroed.bytes()));
    write_copies(p);
    return p;
}

void ParameterStore::allocate_gradients() {
    constexpr int64_t kAlignment = 256 / sizeof(float);
    for (const bool expert : {false, true}) {
        int64_t total = 0;
        for (const Parameter& p : parameters_)
            if (p.spec.expert == expert) total += round_up(p.numel(), kAlignment);
        if (total == 0) continue;
        TensorView& all = expert ? expert_gradients_ : dense_gradients_;
        all = arena_.tensor(DType::f32, {total}, "main_grad");
        ops_.device().fill(all.data, 0, static_cast<size_t>(all.bytes()));
        float* next = all.as<float>();
        for (Parameter& p : parameters_) {
            if (p.spec.expert != expert) continue;
            p.main_grad = p.master;
            p.main_grad.data = next;
            next += round_up(p.numel(), kAlignment);
        }
    }
}

ParameterStore::Gradients ParameterStore::gradients_of(size_t first, size_t last) const {
    Gradients found;
    for (size_t i = first; i < last; ++i) {
        const TensorView& gradient = parameters_[i].main_grad;
        TensorView& all = parameters_[i].spec.expert ? found.expert : found.dense;
        float* const begin = all ? all.as<float>() : gradient.as<float>();
        all = make_view(begin, DType::f32, {gradient.as<float>() + gradient.numel() - begin});
    }
    return found;
}

void ParameterStore::write_copies(Parameter& p) {
    if (p.plain && p.plain.data != p.master.data) ops_.cast({.x = p.master, .y = p.plain});
    if (p.fprop) {
        ops_.quantize_weight({.src = p.master,
                              .scale_format = p.spec.format.scale_format,
                              .mx_rounding = p.spec.format.mx_rounding,
                              .fprop = p.fprop,
                              .dgrad = p.dgrad});
    }
}

}  // namespace fp8flow
