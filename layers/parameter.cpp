// SPDX-License-Identifier: MIT
// Initial values by name and global index, so that every rank layout starts equal; the working copies of each
// recipe.
#include "layers/parameter.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <regex>
#include <set>
#include <vector>

namespace fp8flow {

namespace {

bool is_part(const std::string& part, const std::string& name) {
    return ::fnmatch(("*" + part + "*").c_str(), name.c_str(), 0) == 0;
}

TensorView shaped_as(const ParameterSpec& spec, const TensorView& flat) {
    const int64_t* s = spec.shape;
    if (spec.rank == 1) return flat;
    return spec.rank == 2 ? flat.reshape({s[0], s[1]}) : flat.reshape({s[0], s[1], s[2]});
}

// Drawn by global index, so that an expert's weights do not depend on who holds it.
void write_initial_values(const Parameter& parameter, const TensorView& master, uint64_t seed, Ops& ops) {
    switch (parameter.spec.init) {
        case Init::normal:
            ops.fill_normal({.seed = seed,
                             .stream = parameter.stream,
                             .first = parameter.first_element(),
                             .standard_deviation = parameter.spec.init_std,
                             .y = master});
            return;
        case Init::zeros: ops.zero({.y = master}); return;
        case Init::ones: {
            const std::vector<float> ones(static_cast<size_t>(master.numel()), 1.0f);
            ops.device().copy_in(master.data, ones.data(), ones.size() * sizeof(float));
            ops.device().synchronize();  // the source goes out of scope
            return;
        }
    }
}

// Every rank draws the whole tensor once, so that the copies need no other rank, and keeps its slice.
template <class WriteCopies>
void write_initial_shard(const Parameter& parameter, uint64_t seed, Ops& ops, WriteCopies write_copies) {
    Arena once(ops.device(), "initial values");
    const TensorView whole =
        shaped_as(parameter.spec, once.tensor(DType::f32, {parameter.numel()}, "initial values"));
    write_initial_values(parameter, whole, seed, ops);
    const TensorView here = parameter.part_here(whole);
    ops.device().copy(parameter.master.data, here.data, static_cast<size_t>(here.bytes()));
    write_copies(whole);
    ops.device().synchronize();  // `once` ends here
}

}  // namespace

bool is_frozen(const Freeze& freeze, const std::string& name) {
    return std::any_of(freeze.names.begin(), freeze.names.end(),
                       [&](const std::string& part) { return is_part(part, name); });
}

Arena& ParameterStore::arena_of_plain_copy(const Parameter& p) {
    if (!p.is_sharded()) return arena_;
    return plain_copies_.try_emplace(kind_of_copy(p.spec), ops_.device(), "plain copies").first->second;
}

Parameter& ParameterStore::add(const ParameterSpec& spec) {
    Parameter& p = parameters_.emplace_back();
    p.spec = spec;
    p.stream = fnv1a64(spec.name);
    p.frozen = is_frozen(freeze_, spec.name);
    p.has_moments = !p.frozen || freeze_.keeps_moments;
    p.shard = spec.expert ? shards_.expert : shards_.dense;
    StateCut& cut = spec.expert ? expert_cut_ : dense_cut_;
    p.first_gradient = cut.first;
    p.shards = state_shards(p.numel(), p.shard.size, cut);
    if (!p.frozen) cut = next_cut(cut, p.numel(), p.shard.size, gradient_alignment(spec.expert));
    p.slice = p.shards[static_cast<size_t>(p.shard.rank)].front();
    const bool here = masters_ == Masters::own;
    if (here) allocate_state(p);
    const WeightFormat& format = spec.format;
    if (format.plain && spec.plain_dtype == DType::f32 && !p.is_sharded() && here) {
        p.plain = p.master;
    } else if (format.plain) {
        Arena& arena = arena_of_plain_copy(p);
        p.plain = shaped_as(spec, arena.tensor(spec.plain_dtype, {p.numel()}, "copies"));
        p.plain_chunk = arena.mark().chunk;
    }
    if (format.fp8_layout != ScaleLayout::none) {
        FP8FLOW_CHECK(spec.rank > 1, "{} has rank {}", spec.name, spec.rank);
        const auto [e, n, k] = spec.matrices();
        p.fprop = arena_.fp8(format.dtype, {e, n, k}, format.fp8_layout, "copies");
        p.dgrad = arena_.fp8(format.dtype, {e, k, n}, format.fp8_layout, "copies");
    }
    if (!here) return p;
    if (p.is_sharded()) {
        write_initial_shard(p, seed_, ops_, [&](const TensorView& whole) { write_copies(p, whole, {}); });
    } else {
        write_initial_values(p, p.master, seed_, ops_);
        write_copies(p);
    }
    for (const TensorView& zeroed : {p.m, p.v})
        if (zeroed) ops_.device().fill(zeroed.data, 0, static_cast<size_t>(zeroed.bytes()));
    return p;
}

// Of this rank's slice: flat if it is not the whole parameter.
void ParameterStore::allocate_state(Parameter& p) {
    const auto allocate = [&](DType dtype, const char* category) {
        const TensorView values = arena_.tensor(dtype, {p.slice.count}, category);
        return p.is_sharded() ? values : shaped_as(p.spec, values);
    };
    p.master = allocate(DType::f32, "master");
    if (!p.has_moments) return;
    p.m = allocate(state_dtype(dtypes_.exp_avg_dtype), "moments");
    p.v = allocate(state_dtype(dtypes_.exp_avg_sq_dtype), "moments");
}

int64_t ParameterStore::gradient_alignment(bool expert) const {
    return 256 / size_of(expert ? state_dtype(dtypes_.main_grads_dtype) : DType::f32);
}

void ParameterStore::check_frozen() const {
    std::set<std::string> names;
    for (const Parameter& p : parameters_)
        names.insert(std::regex_replace(p.spec.name, std::regex("layers\\.[0-9]+"), "layers.N"));
    for (const std::string& part : freeze_.names)
        require(std::any_of(parameters_.begin(), parameters_.end(),
                            [&](const Parameter& p) { return is_part(part, p.spec.name); }),
                ExitCode::usage, "training.freeze: got {}, want a part of a parameter's name: {}", part,
                fmt::join(names, ", "));
    require(!std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return p.frozen; }),
            ExitCode::usage, "training.freeze: got every parameter, want some that are trained");
}

void ParameterStore::allocate_gradients() {
    if (!freeze_.names.empty()) check_frozen();
    for (const Parameter& p : parameters_) sources_ = std::max(sources_, p.spec.sources);
    for (const bool expert : {false, true}) {
        const DType dtype = expert ? state_dtype(dtypes_.main_grads_dtype) : DType::f32;
        const int64_t total = expert ? expert_cut_.first : dense_cut_.first;
        if (total == 0) continue;
        const int64_t sources = expert ? sources_ : 1;
        const TensorView of_sources = arena_.tensor(dtype, {sources * total}, "main_grad");
        ops_.device().fill(of_sources.data, 0, static_cast<size_t>(of_sources.bytes()));
        TensorView& all = expert ? expert_gradients_ : dense_gradients_;
        all = of_sources.slice(0, total);
        if (expert) source_stride_ = total;
        for (Parameter& p : parameters_) {
            if (p.spec.expert != expert || p.frozen) continue;
            p.main_grad = shaped_as(p.spec, all.slice(p.first_gradient, p.numel()));
            p.source_stride = total;
        }
    }
    allocate_unread_gradients();
    if (expert_gradients_) allocate_squares();
    std::vector<int64_t> dense, experts;
    for (const Parameter& p : parameters_)
        if (p.is_sharded() && p.fprop) (p.spec.expert ? experts : dense).push_back(p.numel());
    const int64_t gathered = std::max(gathered_elements(dense, shards_.most_gathered),
                                      gathered_elements(experts, shards_.most_gathered));
    if (gathered > 0) gathered_ = arena_.tensor(DType::f32, {gathered}, "gathered master");
}

void ParameterStore::allocate_unread_gradients() {
    const auto is_unread = [](const Parameter& p) { return p.frozen && p.spec.gradient_with_dx; };
    int64_t largest = 0;
    for (const Parameter& p : parameters_)
        if (is_unread(p)) largest = std::max(largest, p.numel());
    if (largest == 0) return;
    const TensorView unread = arena_.tensor(DType::f32, {largest}, "main_grad");
    ops_.device().fill(unread.data, 0, static_cast<size_t>(unread.bytes()));
    for (Parameter& p : parameters_)
        if (is_unread(p)) p.main_grad = shaped_as(p.spec, unread.slice(0, p.numel()));
}

void ParameterStore::allocate_squares() {
    const auto shape = [](const ParameterSpec& of) {
        return op::squares_shape(of.shape[0], of.shape[1], of.shape[2]);
    };
    const auto entries = [](const std::array<int64_t, 4>& s) { return s[0] * s[1] * s[2] * s[3]; };
    int64_t total = 0;
    for (const Parameter& p : parameters_)
        if (p.spec.expert && !p.frozen) total += entries(shape(p.spec));
    expert_squares_ = arena_.tensor(DType::f64, {total}, "squares");
    ops_.device().fill(expert_squares_.data, 0, static_cast<size_t>(expert_squares_.bytes()));
    int64_t next = 0;
    for (Parameter& p : parameters_) {
        if (!p.spec.expert || p.frozen) continue;
        const std::array<int64_t, 4> s = shape(p.spec);
        p.squares = expert_squares_.slice(next, entries(s)).reshape({s[0], s[1], s[2], s[3]});
        next += entries(s);
    }
}

TensorView Parameter::gradient_of(int64_t source) const {
    TensorView gradient = main_grad;
    if (spec.rank == 2) gradient = gradient.reshape({1, spec.shape[0], spec.shape[1]});
    gradient.data = main_grad.bytes_ptr() + source * source_stride * size_of(main_grad.dtype);
    return gradient;
}

ParameterStore::Gradients ParameterStore::gradients_of(size_t first, size_t last) const {
    Gradients found;
    for (size_t i = first; i < last; ++i) {
        if (parameters_[i].frozen) continue;
        const TensorView& gradient = parameters_[i].main_grad;
        TensorView& all = parameters_[i].spec.expert ? found.expert : found.dense;
        uint8_t* const begin = all ? all.bytes_ptr() : gradient.bytes_ptr();
        const int64_t bytes = gradient.bytes_ptr() + gradient.bytes() - begin;
        all = make_view(begin, gradient.dtype, {bytes / size_of(gradient.dtype)});
    }
    return found;
}

void ParameterStore::write_copies(const Parameter& p, const TensorView& master, const Launch& launch) {
    if (p.plain && p.plain.data != master.data) ops_.cast({.x = master, .y = p.plain}, launch);
    if (p.fprop) {
        const auto [e, n, k] = p.spec.matrices();
        ops_.quantize_weight({.src = master.reshape({e, n, k}),
                              .scale_format = p.spec.format.scale_format,
                              .mx_rounding = p.spec.format.mx_rounding,
                              .fprop = p.fprop,
                              .dgrad = p.dgrad},
                             launch);
    }
}

std::map<std::string, int64_t> ParameterStore::bytes() const {
    std::map<std::string, int64_t> all = arena_.by_category();
    for (const auto& [kind, arena] : plain_copies_)
        for (const auto& [category, bytes] : arena.by_category()) all[category] += bytes;
    return all;
}

void ParameterStore::write_copies(Parameter& p) {
    FP8FLOW_CHECK(!p.is_sharded(), "{}: {} of {} elements are here", p.spec.name, p.slice.count, p.numel());
    write_copies(p, p.master, {});
}

}  // namespace fp8flow
