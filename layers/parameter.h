// SPDX-License-Identifier: MIT
// Parameters: FP32 master, moments, main gradient, and the working copies (BF16, or FP8 in both orientations)
// that the recipe declares. The optimizer writes the copies; layers read views of them. Read next: context.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/shards.h"
#include "kernels/ops.h"
#include "layers/spec.h"

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow {

// Which working copies a recipe computes with.
struct WeightFormat {
    bool plain = true;  // a copy in the activation dtype
    ScaleLayout fp8_layout =
        ScaleLayout::none;      // FP8 copies fprop [E, N, K] and dgrad [E, K, N] with these scales
    DType dtype = DType::e4m3;  // of these
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
};

// State that a step leaves in addition to the parameters and their moments; every rank has the same.
struct NamedTensor {
    std::string name;
    TensorView view;
};

// How optimizer state is sharded (use_distributed_optimizer): this rank among those that hold the same
// parameters. Dense parameters: all ranks. Expert parameters: their replicas.
struct StateShards {
    struct GroupRank {
        int64_t rank = 0, size = 1;
    };
    GroupRank dense = {}, expert = {};
    // Combine order `invariant` adds expert gradients by source rank and their squares by expert, so every
    // rank needs the whole sums.
    bool whole_expert_gradients = false;
    // Most elements of masters in one all-gather (128 MiB), unless one master is larger.
    int64_t most_gathered = int64_t{32} << 20;
};
// Elements of the buffer for these masters, all dense or all of experts.
int64_t gathered_elements(const std::vector<int64_t>& masters, int64_t most = StateShards{}.most_gathered);

// Shards are cut at blocks of the gradient norm (op::kNormSquaredBlock), counted over the main gradients of
// dense or of expert parameters. So every block belongs to one rank, and the norm does not depend on the
// sharding.
struct StateCut {
    int64_t first = 0;  // offset of its main gradient
    int64_t rank = 0;   // the rank that has the block before `first`, and the start of this parameter
};
// The slice of a parameter that each of `size` ranks updates, in row-major order. Slices are equal up to
// whole blocks. The first slice belongs to the rank of the cut, the next ones to the ranks after it,
// cyclically.
Shards state_shards(int64_t numel, int64_t size, const StateCut& cut);
// The cut of the next parameter; main gradients are padded to `alignment` elements.
StateCut next_cut(const StateCut& cut, int64_t numel, int64_t size, int64_t alignment);

enum class Init { normal, zeros, ones };

struct ParameterSpec {
    std::string name;              // "layers.3.moe.experts.linear_fc1.weight"; seeds the initial values
    int64_t shape[3] = {0, 0, 0};  // [N], [N, K] or [E, N, K]
    int rank = 2;
    Init init = Init::normal;
    double init_std = 0.02;
    bool expert = false;       // leading dimension: local experts, different on each expert-parallel rank
    int64_t first_expert = 0;  // global id of local expert 0
    int64_t sources = 1;       // source ranks with separate gradient sums (expert weights)
    bool weight_decay = true;
    bool gradient_with_dx = false;  // one operation writes both gradients, also if the parameter is frozen
    WeightFormat format;
    DType plain_dtype = DType::bf16;  // dtype of the plain copy; f32: the master itself serves

    // As a grouped GEMM takes the weight; [N, K] is one matrix.
    struct Matrices {
        int64_t count, rows, cols;
    };
    Matrices matrices() const {
        return rank == 2 ? Matrices{1, shape[0], shape[1]} : Matrices{shape[0], shape[1], shape[2]};
    }
};

struct Parameter {
    ParameterSpec spec;
    bool frozen = false, has_moments = true;
    uint64_t stream = 0;           // of its random numbers: a hash of the name
    StateShards::GroupRank shard;  // of master, m and v
    Shards shards;                 // one slice per rank
    Slice slice;                   // this rank's; all of it if shard.size is 1
    TensorView master, m, v;       // spec.shape, or [slice.count] of a shard; f32, or as StateDtypes says
    TensorView main_grad;          // spec.shape; f32, or as StateDtypes says; of a frozen one: below
    int64_t first_gradient = 0;    // offset among the dense, or the expert, main gradients
    int64_t source_stride = 0;     // elements from the gradient of one source to that of the next
    TensorView squares;            // of main_grad, expert parameters: kernels/ops/squares.h; f64
    TensorView plain;              // working copy in the activation dtype; may be the master itself
    size_t plain_chunk = 0;  // arena chunk of `plain`; copies of sharded parameters of a kind are contiguous
    ScaledTensor fprop, dgrad;

    // As GEMM operands [E, N, K] of the grouped GEMM.
    ScaledTensor for_fprop() const { return fprop ? fprop : ScaledTensor{.data = plain}; }
    // [E, N, K]: the gradient of the tokens of one source rank. main_grad is that of source 0, and later the
    // sum.
    TensorView gradient_of(int64_t source) const;
    int64_t numel() const;
    bool is_sharded() const { return shard.size > 1; }
    // The ranks that hold it.
    Ranks ranks() const { return spec.expert ? Ranks::expert_replicas : Ranks::world; }
    // The slice of a tensor of this parameter's shape that this rank's master, m and v cover.
    TensorView part_here(const TensorView& whole) const;
    // Index of this rank's first element in the tensor of all ranks' experts.
    int64_t first_element() const { return spec.expert ? spec.first_expert * (numel() / spec.shape[0]) : 0; }
};

// Who owns masters and main gradients. callers: the caller, and there are no moments. The store then has the
// working copies only: write_copies fills them from the caller's masters, who also sets main_grad.
enum class Masters : uint8_t { own, callers };

bool is_frozen(const Freeze& freeze, const std::string& name);

// All parameters of a model in a fixed order: the order of the optimizer, the gradient reduction and the hash
// of weights.
class ParameterStore {
public:
    ParameterStore(Ops& ops, uint64_t seed, const StateDtypes& dtypes = {}, const StateShards& shards = {},
                   Masters masters = Masters::own, const Freeze& freeze = {})
        : ops_(ops),
          seed_(seed),
          dtypes_(dtypes),
          shards_(shards),
          masters_(masters),
          freeze_(freeze),
          arena_(ops.device(), "parameters", false, Arena::Order::first_fit),
          sums_(ops.device(), "sums over sources") {}

    // Allocates everything except the main gradient, initialises from Philox(seed, hash(name), global element
    // index) and writes the working copies. Masters::callers: allocates the copies only and writes nothing.
    Parameter& add(const ParameterSpec& spec);
    // Call it once, after the last add. Allocates the main gradients: contiguous for dense parameters, and
    // for expert parameters, so that each kind is one reduction over ranks. Each starts at a multiple of 256
    // bytes; gaps are 0. Expert gradients exist once per source, all of source 0 first. The sums of squares
    // of expert gradients are allocated in the same way, without gaps. Frozen parameters have no gradient.
    // Throws Error(usage) for a name in Freeze that no parameter has. Those with gradient_with_dx share one
    // tensor that nobody reads.
    void allocate_gradients();
    // [N], dense f32, expert as StateDtypes says; absent if there are none.
    TensorView dense_gradients() const { return dense_gradients_; }
    TensorView expert_gradients() const { return expert_gradients_; }
    // [P] f64: of all expert parameters, as the weight gradients with Context::sums_squares left them.
    TensorView expert_squares() const { return expert_squares_; }
    // Of the parameters added first to last, last excluded.
    struct Gradients {
        TensorView dense, expert;  // [N]; absent if there are none
    };
    Gradients gradients_of(size_t first, size_t last) const;
    // Their sums over the ranks that have the same parameters. With sharded state every rank gets the sums of
    // its slices only, unless StateShards says otherwise. replica: as below.
    void reduce_gradients(Exchange& exchange, int64_t replica, size_t first, size_t last,
                          const Launch& launch = {});
    // Whether a rank has the sums of its own slices only, for dense or for expert gradients; and the slices
    // of each rank.
    bool shards_gradients(bool expert) const;
    Shards gradient_shards(bool expert) const { return gradient_shards(0, parameters_.size(), expert); }
    // Collective: gives every rank the whole sums.
    void gather_gradients(Exchange& exchange);
    // Sums `gradient`, a part of expert_gradients(), over all ranks that hold these experts. With several
    // sources: over all source ranks of the job in ascending order, as if every rank held all experts.
    // replica: that of this rank.
    void reduce_expert_gradients(Exchange& exchange, int64_t replica, const TensorView& gradient,
                                 const Launch& launch = {});
    std::deque<Parameter>& all() { return parameters_; }
    const std::deque<Parameter>& all() const { return parameters_; }
    // Writes the working copies of one parameter from its master, which is not sharded.
    void write_copies(Parameter& parameter);
    // The same from the caller's master (f32 or bf16, the parameter's shape), which is not kept.
    void write_copies(const Parameter& parameter, const TensorView& master, const Launch& launch);
    // The same for all parameters. Collective: sharded masters are gathered.
    void write_all_copies(Exchange& exchange);
    // After each rank has updated its slices: writes the working copies of the sharded trained parameters
    // added first to last, last excluded. Collective. BF16 copies are gathered directly, contiguous ones in
    // one call. FP8 copies are rebuilt from gathered masters, because a scale may span slices, and so does a
    // row of the transposed copy.
    void gather_copies(Exchange& exchange, size_t first, size_t last, const Launch& launch = {});
    // The whole FP32 master of a sharded parameter, in `whole`, f32 of its size.
    void gather_master(Exchange& exchange, const Parameter& parameter, const TensorView& whole,
                       const Launch& launch = {});
    // Bytes by category: master, moments, main_grad, copies, gathered master.
    std::map<std::string, int64_t> bytes() const;

private:
    void check_frozen() const;
    void allocate_state(Parameter& parameter);
    void allocate_squares();
    void allocate_unread_gradients();
    // Of a sharded parameter's plain copy: expert or dense, and dtype.
    using CopyKind = std::pair<bool, DType>;
    static CopyKind kind_of_copy(const ParameterSpec& spec) { return {spec.expert, spec.plain_dtype}; }
    Arena& arena_of_plain_copy(const Parameter& parameter);
    void gather_copies(Exchange& exchange, const std::vector<const Parameter*>& parameters,
                       const Launch& launch);
    void gather_masters(Exchange& exchange, bool expert, const std::vector<const Parameter*>& parameters,
                        const Launch& launch);
    // Copies this rank's slice of a sharded master to its place in `whole`.
    void place_slice(const Parameter& parameter, const TensorView& whole, const Launch& launch);
    Shards gradient_shards(size_t first, size_t last, bool expert) const;
    int64_t gradient_alignment(bool expert) const;  // elements
    std::vector<TensorView> rows_of_sources(Exchange& exchange, int64_t replica, const TensorView& piece,
                                            const Launch& launch);

    Ops& ops_;
    uint64_t seed_;
    StateDtypes dtypes_;
    StateShards shards_;
    Masters masters_;
    Freeze freeze_;
    Arena arena_, sums_;
    std::map<CopyKind, Arena> plain_copies_;  // of sharded parameters
    int64_t sources_ = 1, source_stride_ = 0;
    StateCut dense_cut_, expert_cut_;  // of the next parameter
    std::deque<Parameter> parameters_;
    TensorView dense_gradients_, expert_gradients_, expert_squares_;
    TensorView gathered_;  // [N] f32: gathered masters, while FP8 copies are written
};

}  // namespace fp8flow
