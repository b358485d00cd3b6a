// SPDX-License-Identifier: MIT
// Attention on cuDNN through cudnn-frontend's graphs: the one file that includes their headers. A graph is
// built once for each shape and kept; q, k, v, o and the gradients are used in place, as [sequences, heads,
// length, D] with the strides of [T, heads, D].
#include "kernels/hopper/attention/cudnn.h"

#include "kernels/core/error.h"
#include "kernels/hopper/attention/lse.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/launch.h"

#include <cudnn_frontend.h>

#include <compare>
#include <map>
#include <unordered_map>
#include <vector>

namespace fp8flow::hopper {

using namespace attention;

namespace {

namespace fe = cudnn_frontend;

constexpr std::size_t kOldestCudnn = 90500;
constexpr int64_t kTile = 128;  // rows and columns of cuDNN's tiles

// Heads that run on cuDNN: columns of q and k, columns of v, and the oldest version of cuDNN on which
// their deterministic backward was tested.
struct HeadSizes {
    int64_t depth, value_depth;
    std::size_t oldest;
};
constexpr HeadSizes kHeads[] = {{64, 64, kOldestCudnn},
                                {128, 128, kOldestCudnn},
                                {192, 128, 91900},
                                {192, 192, 91900},
                                {256, 256, 91900}};
// nullptr if cuDNN does not support these head sizes.
const HeadSizes* sizes_of(int64_t depth, int64_t value_depth) {
    const auto* const found = std::ranges::find_if(kHeads, [&](const HeadSizes& heads) {
        return heads.depth == depth && heads.value_depth == value_depth;
    });
    return found != std::end(kHeads) ? found : nullptr;
}

// The deterministic backward keeps a score gradient of 2 bytes for every query, key and head in its
// workspace, so it runs in parts: of at most kPartBytes where one group of heads of one sequence is smaller
// than that, and never of more than kMostBytes.
constexpr int64_t kPartBytes = int64_t{1} << 30;
constexpr int64_t kMostBytes = int64_t{4} << 30;
int64_t score_bytes(int64_t heads, int64_t length) {
    const int64_t padded = round_up(length, kTile);
    return 2 * heads * padded * padded;
}

// The largest divisor of `count` that is at most `most`, at least 1.
int64_t divisor_up_to(int64_t count, int64_t most) {
    int64_t divisor = std::clamp<int64_t>(most, 1, count);
    while (count % divisor != 0) --divisor;
    return divisor;
}

enum class Pass { forward, backward };

// The shape of a graph: `sequences` sequences and `kv_heads` key heads with their query heads, in rows of
// all_heads and all_kv_heads.
struct Key {
    Pass pass;
    int64_t sequences, length, heads, kv_heads, all_heads, all_kv_heads, depth, value_depth;
    float scale;
    auto operator<=>(const Key&) const = default;

    int64_t lse_bytes() const { return round_up(4 * sequences * heads * length, 256); }
    // Keys past the end of the sequence are masked explicitly where cuDNN's tiles reach past it;
    // cudnn-frontend would do the same, but with a copy from the host in every call.
    bool is_padded() const { return pass == Pass::backward && length % kTile != 0; }
};

// A graph for these sequences and key heads of a call.
template <class Args> Key key_of(const Args& args, Pass pass, int64_t sequences, int64_t kv_heads) {
    return {.pass = pass,
            .sequences = sequences,
            .length = args.seq_length,
            .heads = kv_heads * (args.q.dim(1) / args.k.dim(1)),
            .kv_heads = kv_heads,
            .all_heads = args.q.dim(1),
            .all_kv_heads = args.k.dim(1),
            .depth = args.q.dim(2),
            .value_depth = args.v.dim(2),
            .scale = args.scale};
}
// The log-sum-exps of a call of the graph, for sequences from `row` on and heads from `head` on.
LsePart lse_part(const Key& key, int64_t row, int64_t head) {
    return {.sequences = key.sequences,
            .length = key.length,
            .heads = key.all_heads,
            .first_row = row,
            .first_head = head,
            .part_heads = key.heads};
}

struct Plan {
    std::unique_ptr<fe::graph::Graph> graph;
    int64_t workspace_bytes = 0;
    void* lengths = nullptr;  // [sequences] i32, where keys are masked
};

enum Uid : int64_t { kQ = 1, kK, kV, kO, kLse, kDout, kDq, kDk, kDv, kQueryLengths, kKeyLengths };

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

std::string version_text(std::size_t version) {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void check(fe::error_t status, ExitCode code, const char* what, const Key& key) {
    if (status.is_good()) return;
    fail(code,
         "cuDNN {}: {} of attention ({} sequences of {}, heads {}/{}, columns {} and {}): {}; "
         "kernels.attention_backend=native avoids it",
         version_text(cudnnGetVersion()), what, key.sequences, key.length, key.heads, key.kv_heads, key.depth,
         key.value_depth, status.get_message());
}
void check(cudnnStatus_t status, const char* what) {
    require(status == CUDNN_STATUS_SUCCESS, ExitCode::internal,
            "cuDNN {}: {}: {}; kernels.attention_backend=native avoids it", version_text(cudnnGetVersion()),
            what, cudnnGetErrorString(status));
}

// A tensor's heads of `depth` columns: those of the call, and those of its rows.
struct HeadsOf {
    int64_t heads, all_heads, depth;
};
// [sequences, heads, length, depth] in rows of all_heads.
std::vector<int64_t> sizes(const Key& key, const HeadsOf& of) {
    return {key.sequences, of.heads, key.length, of.depth};
}
std::vector<int64_t> strides(const Key& key, const HeadsOf& of) {
    return {key.length * of.all_heads * of.depth, of.depth, of.all_heads * of.depth, 1};
}

class GraphBuilder {
public:
    explicit GraphBuilder(const Key& key) : key_(key), graph_(std::make_unique<fe::graph::Graph>()) {
        graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    std::unique_ptr<fe::graph::Graph> forward() {
        const Tensor q = input("q", kQ, queries()), k = input("k", kK, keys()), v = input("v", kV, values());
        auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
        options.set_attn_scale(key_.scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        auto [o, lse] = graph_->sdpa(q, k, v, options);
        output(o, kO, outputs());
        lse->set_output(true)
            .set_uid(kLse)
            .set_data_type(fe::DataType_t::FLOAT)
            .set_dim(lse_sizes())
            .set_stride(lse_strides());
        return std::move(graph_);
    }

    std::unique_ptr<fe::graph::Graph> backward() {
        const Tensor q = input("q", kQ, queries()), k = input("k", kK, keys()), v = input("v", kV, values()),
                     o = input("o", kO, outputs()), dout = input("dout", kDout, outputs());
        const Tensor lse = graph_->tensor(fe::graph::Tensor_attributes()
                                              .set_name("lse")
                                              .set_uid(kLse)
                                              .set_data_type(fe::DataType_t::FLOAT)
                                              .set_dim(lse_sizes())
                                              .set_stride(lse_strides()));
        auto options =
            fe::graph::SDPA_backward_attributes().set_name("attention backward").set_attn_scale(key_.scale);
        options.set_deterministic_algorithm(true)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        if (key_.is_padded())
            options.set_padding_mask(true)
                .set_seq_len_q(lengths("query lengths", kQueryLengths))
                .set_seq_len_kv(lengths("key lengths", kKeyLengths));
        auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, o, dout, lse, options);
        output(dq, kDq, queries());
        output(dk, kDk, keys());
        output(dv, kDv, values());
        return std::move(graph_);
    }

private:
    HeadsOf queries() const { return {key_.heads, key_.all_heads, key_.depth}; }
    HeadsOf keys() const { return {key_.kv_heads, key_.all_kv_heads, key_.depth}; }
    HeadsOf values() const { return {key_.kv_heads, key_.all_kv_heads, key_.value_depth}; }
    HeadsOf outputs() const { return {key_.heads, key_.all_heads, key_.value_depth}; }

    Tensor input(const char* name, Uid uid, const HeadsOf& of) {
        return graph_->tensor(fe::graph::Tensor_attributes()
                                  .set_name(name)
                                  .set_uid(uid)
                                  .set_dim(sizes(key_, of))
                                  .set_stride(strides(key_, of)));
    }
    Tensor lengths(const char* name, Uid uid) {
        return graph_->tensor(fe::graph::Tensor_attributes()
                                  .set_name(name)
                                  .set_uid(uid)
                                  .set_data_type(fe::DataType_t::INT32)
                                  .set_dim({key_.sequences, 1, 1, 1})
                                  .set_stride({1, 1, 1, 1}));
    }
    void output(const Tensor& tensor, Uid uid, const HeadsOf& of) {
        tensor->set_output(true).set_uid(uid).set_dim(sizes(key_, of)).set_stride(strides(key_, of));
    }
    std::vector<int64_t> lse_sizes() const { return {key_.sequences, key_.heads, key_.length, 1}; }
    std::vector<int64_t> lse_strides() const { return {key_.heads * key_.length, key_.length, 1, 1}; }

    Key key_;
    std::unique_ptr<fe::graph::Graph> graph_;
};

// Rows [row, ...) from head `head` on, of a tensor [T, all_heads, D] in bf16.
void* at(const TensorView& tensor, int64_t row, int64_t head) {
    return tensor.bytes_ptr() + 2 * (row * tensor.dim(1) + head) * tensor.dim(2);
}

}  // namespace

std::string cudnn_problem() {
    const std::size_t version = cudnnGetVersion();
    if (version >= kOldestCudnn && version / 10000 == CUDNN_MAJOR) return {};
    return fmt::format("the library loaded is cuDNN {}, want {}.x from {} on", version_text(version),
                       CUDNN_MAJOR, version_text(kOldestCudnn));
}

std::string cudnn_problem(int64_t depth, int64_t value_depth) {
    if (std::string problem = cudnn_problem(); !problem.empty()) return problem;
    const HeadSizes* const sizes = sizes_of(depth, value_depth);
    const std::size_t version = cudnnGetVersion();
    const std::string heads = fmt::format("heads of {} columns, {} of values", depth, value_depth);
    if (sizes == nullptr) return "cuDNN has no deterministic backward for " + heads;
    if (version >= sizes->oldest) return {};
    return fmt::format("{} need cuDNN {} or later, and {} is loaded", heads, version_text(sizes->oldest),
                       version_text(version));
}

struct CudnnAttention::State {
    explicit State(Device& owner) : device(owner) {}
    ~State() {
        for (auto& [key, plan] : plans)
            if (plan.lengths != nullptr) device.free(plan.lengths);
        if (scratch != nullptr) device.free(scratch);
        if (handle != nullptr) cudnnDestroy(handle);
    }

    // The plan of a shape; made at the first call, with all the memory it needs.
    const Plan& plan_of(const Key& key) {
        const auto found = plans.find(key);
        if (found != plans.end()) return found->second;
        if (handle == nullptr) {
            const std::string problem = cudnn_problem();
            require(problem.empty(), ExitCode::usage, "kernels.attention_backend=cudnn: {}", problem);
            check(cudnnCreate(&handle), "creating a handle");
        }
        Plan plan;
        plan.graph = key.pass == Pass::forward ? GraphBuilder(key).forward() : GraphBuilder(key).backward();
        check(plan.graph->build(handle, {fe::HeurMode_t::A}), ExitCode::usage, "planning", key);
        check(plan.graph->get_workspace_size(plan.workspace_bytes), ExitCode::internal, "sizing", key);
        reserve(key.lse_bytes() + plan.workspace_bytes);
        if (key.is_padded()) {
            const std::vector<int32_t> lengths(static_cast<std::size_t>(key.sequences),
                                               static_cast<int32_t>(key.length));
            plan.lengths = device.allocate(lengths.size() * sizeof(int32_t));
            device.copy_in(plan.lengths, lengths.data(), lengths.size() * sizeof(int32_t));
            device.synchronize();
        }
        return plans.emplace(key, std::move(plan)).first->second;
    }

    // The packed log-sum-exps are at the start of the scratch; cuDNN's workspace follows.
    float* packed_lse() const { return static_cast<float*>(scratch); }
    void run(const Key& key, const Plan& plan, std::unordered_map<int64_t, void*> tensors,
             const Launch& launch) {
        tensors[kLse] = scratch;
        if (key.is_padded()) tensors[kQueryLengths] = tensors[kKeyLengths] = plan.lengths;
        check(cudnnSetStream(handle, stream_of(launch)), "setting the stream");
        void* workspace = static_cast<uint8_t*>(scratch) + key.lse_bytes();
        check(plan.graph->execute(handle, tensors, workspace), ExitCode::internal, "a launch", key);
    }

    Device& device;
    cudnnHandle_t handle = nullptr;
    std::map<Key, Plan> plans;
    void* scratch = nullptr;  // shared by all plans: operations of a stream run one after the other

private:
    void reserve(int64_t bytes) {
        if (bytes <= scratch_bytes_) return;
        if (scratch != nullptr) device.free(scratch);  // waits for the kernels that use it
        scratch = nullptr;
        scratch_bytes_ = 0;
        scratch = device.allocate(static_cast<std::size_t>(bytes));
        scratch_bytes_ = bytes;
    }
    int64_t scratch_bytes_ = 0;
};

CudnnAttention::CudnnAttention(Device& device) : state_(std::make_unique<State>(device)) {}
CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::takes(const TensorView& q, const TensorView& k, const TensorView& v,
                           int64_t seq_length) {
    const int64_t group = q.dim(1) / k.dim(1);
    // cudnn-frontend places cuDNN's workspace after a table of 4 bytes per row and head; the workspace must
    // stay aligned to 16 bytes
    const bool aligned = group * seq_length % 4 == 0;
    const HeadSizes* const sizes = sizes_of(q.dim(2), v.dim(2));
    const bool known = sizes != nullptr && cudnnGetVersion() >= sizes->oldest;
    return q.dtype == DType::bf16 && known && seq_length > 1 && aligned &&
           score_bytes(group, seq_length) <= kMostBytes;
}

void CudnnAttention::forward(const op::Attention& args, const Launch& launch) {
    const Key key = key_of(args, Pass::forward, args.q.dim(0) / args.seq_length, args.k.dim(1));
    const Plan& plan = state_->plan_of(key);
    state_->run(key, plan, {{kQ, args.q.data}, {kK, args.k.data}, {kV, args.v.data}, {kO, args.o.data}},
                launch);
    copy_lse(args.lse.as<float>(), lse_part(key, 0, 0), state_->packed_lse(), LseCopy::unpack, launch);
}

void CudnnAttention::backward(const op::AttentionBackward& args, const Launch& launch) {
    const int64_t length = args.seq_length, all_sequences = args.q.dim(0) / length;
    const int64_t all_kv_heads = args.k.dim(1), group = args.q.dim(1) / all_kv_heads;
    const int64_t group_bytes = score_bytes(group, length);
    const int64_t kv_heads = divisor_up_to(all_kv_heads, kPartBytes / group_bytes);
    const int64_t sequences =
        kv_heads < all_kv_heads ? 1 : divisor_up_to(all_sequences, kPartBytes / (group_bytes * kv_heads));
    const Key key = key_of(args, Pass::backward, sequences, kv_heads);
    const Plan& plan = state_->plan_of(key);
    for (int64_t sequence = 0; sequence < all_sequences; sequence += sequences) {
        for (int64_t kv_head = 0; kv_head < all_kv_heads; kv_head += kv_heads) {
            const int64_t row = sequence * length, head = kv_head * group;
            copy_lse(args.lse.as<float>(), lse_part(key, row, head), state_->packed_lse(), LseCopy::pack,
                     launch);
            state_->run(key, plan,
                        {{kQ, at(args.q, row, head)},
                         {kK, at(args.k, row, kv_head)},
                         {kV, at(args.v, row, kv_head)},
                         {kO, at(args.o, row, head)},
                         {kDout, at(args.dout, row, head)},
                         {kDq, at(args.dq, row, head)},
                         {kDk, at(args.dk, row, kv_head)},
                         {kDv, at(args.dv, row, kv_head)}},
                        launch);
        }
    }
}

}  // namespace fp8flow::hopper
