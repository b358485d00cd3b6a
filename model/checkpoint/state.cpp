// SPDX-License-Identifier: MIT
// Names and shapes of the state, and who saves what.
#include "model/checkpoint/state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <regex>
#include <sstream>

namespace fp8flow::checkpoint {

namespace {

constexpr std::string_view kWeight = "fp32_param.", kMoment = "exp_avg";

// "layers.1.moe.experts.linear_fc1.weight" -> "layers.1.moe.experts.3.linear_fc1.weight"
std::string name_of_expert(const std::string& parameter, int64_t expert) {
    constexpr std::string_view kExperts = ".experts.";
    const size_t at = parameter.find(kExperts);
    FP8FLOW_CHECK(at != std::string::npos, "{} has no experts in its name", parameter);
    return parameter.substr(0, at + kExperts.size()) + std::to_string(expert) +
           parameter.substr(at + kExperts.size() - 1);
}

// The ranks that have an expert own its tensors in turn. A tensor that all ranks have goes to the rank with
// the fewest bytes so far, in the order of the list. A slice belongs to the rank that has it.
void choose_owners(std::vector<StateTensor>& state, const RankLayout& layout) {
    const int64_t replicas = layout.world_size / layout.expert_parallel_size;
    std::vector<int64_t> load(static_cast<size_t>(layout.world_size)), turn(load.size());
    for (StateTensor& tensor : state) {
        if (tensor.owner < 0 && tensor.holder < 0) continue;
        if (tensor.owner < 0) {
            int64_t& next = turn[static_cast<size_t>(tensor.holder)];
            tensor.owner = tensor.holder + layout.expert_parallel_size * (next++ % replicas);
        }
        load[static_cast<size_t>(tensor.owner)] += tensor.bytes();
    }
    for (StateTensor& tensor : state) {
        if (tensor.owner >= 0) continue;
        const auto least = std::ranges::min_element(load);
        tensor.owner = least - load.begin();
        *least += tensor.bytes();
    }
}

int64_t product(const std::vector<int64_t>& shape) {
    int64_t numel = 1;
    for (const int64_t size : shape) numel *= size;
    return numel;
}

// A tensor of the state: elements [begin, begin + numel) of a parameter, or of one of its moments.
struct Whole {
    std::string name;
    std::vector<int64_t> shape;
    int64_t begin = 0;
    int64_t holder = -1;
    bool here = true;  // on this rank, or a slice of it
};

// Every rank's slice of it. `part`: this rank's slice of the parameter.
void add_slices(std::vector<StateTensor>& state, const Whole& whole, const Parameter& p,
                const TensorView& part, const RankLayout& layout) {
    const int64_t end = whole.begin + product(whole.shape);
    for (int64_t shard = 0; shard < p.shard.size; ++shard) {
        const Slice slice = p.shards[static_cast<size_t>(shard)].front();
        const int64_t first = std::max(slice.first, whole.begin),
                      last = std::min(slice.first + slice.count, end);
        if (first >= last) continue;
        StateTensor tensor{whole.name, whole.shape, first - whole.begin, last - first, whole.holder};
        tensor.owner = whole.holder < 0 ? shard : whole.holder + layout.expert_parallel_size * shard;
        tensor.dtype = part.dtype;
        if (whole.here && shard == p.shard.rank) tensor.view = part.slice(first - slice.first, last - first);
        state.push_back(std::move(tensor));
    }
}

}  // namespace

int64_t StateTensor::numel() const { return product(shape); }

std::string StateTensor::stored_name() const {
    return is_slice() ? SliceName{name, shape, first, first + count}.text() : name;
}

std::vector<int64_t> StateTensor::stored_shape() const {
    return is_slice() ? std::vector<int64_t>{count} : shape;
}

std::string SliceName::text() const {
    return fmt::format("{}[{}:{} of {}]", tensor, first, last, fmt::join(shape, "x"));
}

std::optional<SliceName> parse_slice_name(const std::string& name) {
    static const std::regex form(R"(\[(\d{1,18}):(\d{1,18}) of (\d{1,18}(x\d{1,18})*)\])");
    const size_t open = name.rfind('[');
    std::smatch parts;
    if (open == std::string::npos ||
        !std::regex_match(name.begin() + static_cast<int64_t>(open), name.end(), parts, form))
        return std::nullopt;
    SliceName slice{.tensor = name.substr(0, open),
                    .first = std::stoll(parts[1].str()),
                    .last = std::stoll(parts[2].str())};
    int64_t numel = 1;
    std::istringstream sizes(parts[3].str());
    for (std::string size; std::getline(sizes, size, 'x');)
        if (__builtin_mul_overflow(numel, slice.shape.emplace_back(std::stoll(size)), &numel))
            return std::nullopt;
    if (slice.first >= slice.last || slice.last > numel || slice.text() != name) return std::nullopt;
    return slice;
}

bool StateTensor::may_be_read_from(FileDType type) const {
    return type == FileDType::f32 || (type == FileDType::bf16 && is_moment(name));
}

FileDType file_dtype(DType dtype) { return dtype == DType::bf16 ? FileDType::bf16 : FileDType::f32; }

bool is_weight(const std::string& state_name) {
    return state_name.starts_with(kWeight) || state_name.ends_with(".expert_bias");
}

bool is_moment(const std::string& state_name) { return state_name.starts_with(kMoment); }

std::vector<StateTensor> training_state(Transformer& transformer, const RankLayout& layout) {
    std::vector<StateTensor> state;
    const auto add = [&](const Whole& whole, const TensorView& view) {
        StateTensor tensor{whole.name, whole.shape, 0, product(whole.shape), whole.holder};
        if (whole.here) tensor.view = view;
        tensor.dtype = view.dtype;
        state.push_back(std::move(tensor));
    };
    const auto add_part = [&](const Parameter& p, const Whole& whole, const TensorView& part) {
        if (p.is_sharded()) return add_slices(state, whole, p, part, layout);
        add(whole, p.spec.expert ? part[whole.begin / product(whole.shape)] : part);
    };
    for (const Parameter& p : transformer.parameters().all()) {
        const std::pair<std::string, TensorView> parts[] = {
            {std::string(kWeight), p.master}, {"exp_avg.", p.m}, {"exp_avg_sq.", p.v}};
        const std::vector<int64_t> shape(p.spec.shape, p.spec.shape + p.spec.rank);
        for (const auto& [prefix, view] : parts) {
            if (prefix != kWeight && !p.has_moments) continue;
            if (!p.spec.expert) {
                add_part(p, {prefix + p.spec.name, shape}, view);
                continue;
            }
            const int64_t local = p.spec.shape[0];
            const std::vector<int64_t> of_expert(shape.begin() + 1, shape.end());
            for (int64_t expert = 0; expert < local * layout.expert_parallel_size; ++expert)
                add_part(p,
                         {prefix + name_of_expert(p.spec.name, expert), of_expert,
                          expert % local * product(of_expert), expert / local,
                          expert / local == layout.expert_parallel_rank()},
                         view);
        }
    }
    for (const NamedTensor& tensor : transformer.state())
        add({tensor.name, {tensor.view.dims, tensor.view.dims + tensor.view.rank}}, tensor.view);
    choose_owners(state, layout);
    return state;
}

}  // namespace fp8flow::checkpoint
