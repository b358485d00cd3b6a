// SPDX-License-Identifier: MIT
// Names and shapes of the state, and who saves what.
#include "model/checkpoint/state.h"

#include <algorithm>

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

std::vector<int64_t> shape_of(const TensorView& view) { return {view.dims, view.dims + view.rank}; }

// Expert e's tensors go round the ranks that have it; what all ranks have goes to the one with the least so
// far, in the order of the list.
void choose_owners(std::vector<StateTensor>& state, const RankLayout& layout) {
    const int64_t replicas = layout.world_size / layout.expert_parallel_size;
    std::vector<int64_t> load(static_cast<size_t>(layout.world_size)), turn(load.size());
    for (StateTensor& tensor : state) {
        if (tensor.holder < 0) continue;
        int64_t& next = turn[static_cast<size_t>(tensor.holder)];
        tensor.owner = tensor.holder + layout.expert_parallel_size * (next++ % replicas);
        load[static_cast<size_t>(tensor.owner)] += tensor.bytes();
    }
    for (StateTensor& tensor : state) {
        if (tensor.holder >= 0) continue;
        const auto least = std::min_element(load.begin(), load.end());
        tensor.owner = least - load.begin();
        *least += tensor.bytes();
    }
}

}  // namespace

int64_t StateTensor::bytes() const {
    int64_t bytes = size_of(dtype);
    for (const int64_t size : shape) bytes *= size;
    return bytes;
}

bool StateTensor::may_be_read_from(FileDType type) const {
    return type == FileDType::f32 || (type == FileDType::bf16 && name.starts_with(kMoment));
}

FileDType file_dtype(DType dtype) { return dtype == DType::bf16 ? FileDType::bf16 : FileDType::f32; }

bool is_weight(const std::string& state_name) {
    return state_name.starts_with(kWeight) || state_name.ends_with(".expert_bias");
}

std::vector<StateTensor> training_state(Transformer& transformer, const RankLayout& layout) {
    std::vector<StateTensor> state;
    const auto add = [&](const std::string& name, const TensorView& view, int64_t holder, bool here) {
        state.push_back({name, shape_of(view), holder, 0, here ? view : TensorView{}, view.dtype});
    };
    for (const Parameter& p : transformer.parameters().all()) {
        const std::pair<std::string, TensorView> parts[] = {
            {std::string(kWeight), p.master}, {"exp_avg.", p.m}, {"exp_avg_sq.", p.v}};
        for (const auto& [prefix, view] : parts) {
            if (!p.spec.expert) {
                add(prefix + p.spec.name, view, -1, true);
                continue;
            }
            const int64_t local = p.spec.shape[0];
            for (int64_t expert = 0; expert < local * layout.expert_parallel_size; ++expert)
                add(prefix + name_of_expert(p.spec.name, expert), view[expert % local], expert / local,
                    expert / local == layout.expert_parallel_rank());
        }
    }
    for (const NamedTensor& tensor : transformer.state()) add(tensor.name, tensor.view, -1, true);
    choose_owners(state, layout);
    return state;
}

}  // namespace fp8flow::checkpoint
