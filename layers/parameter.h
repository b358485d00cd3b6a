// SPDX-License-Identifier: MIT
// Parameters: FP32 master, moments and main gradient, and the working copies (BF16, or FP8 in both
// orientations) that the recipe declares. The optimizer writes the copies; layers only read views. Read next:
// context.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/shares.h"
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

// This rank among those that hold the same parameters and share the state of the optimizer
// (use_distributed_optimizer): of dense parameters all ranks, of expert parameters their replicas.
struct StateShards {
    struct Place {
        int64_t rank = 0, size = 1;
    };
    Place dense = {}, expert = {};
    // Order invariant adds the gradients of experts by source and their squares by expert: every rank gets
    // the whole sums of them.
    bool whole_expert_gradients = false;
    // Elements of masters that are gathered together, at most, unless one alone has more: 128 MiB.
    int64_t most_gathered = int64_t{32} << 20;
};
// Elements of the buffer for it: of masters of so many elements, all dense or all of experts.
int64_t gathered_elements(const std::vector<int64_t>& masters, int64_t most = StateShards{}.most_gathered);

// A parameter is cut at blocks of the gradient norm (op::kNormSquaredBlock), counted over the main gradients
// of its kind. So every block belongs to one rank, and the norm does not depend on the division.
struct StateCut {
    int64_t first = 0;  // offset of its main gradient
    int64_t rank = 0;   // the rank that has the block before `first`, and with it the start of this parameter
};
// The part of a parameter that each of `size` ranks updates: one slice per rank in row-major order, equal but
// for whole blocks. The first slice goes to the rank of the cut, the next ones to the ranks after it,
// cyclically.
Shares state_shares(int64_t numel, int64_t size, const StateCut& cut);
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
    int64_t sources = 1;       // source ranks with a gradient sum of their own (expert weights)
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
    uint64_t stream = 0;         // of its random numbers: a hash of the name
    StateShards::Place shard;    // of master, m and v
    Shares shares;               // of those ranks, each with one slice
    Slice slice;                 // what of them is here; all of it where shard.size is 1
    TensorView master, m, v;     // spec.shape, or [slice.count] of a shard; f32, or as StateDtypes says
    TensorView main_grad;        // spec.shape; f32, or as StateDtypes says; of a frozen one: below
    int64_t first_gradient = 0;  // of it, among the main gradients of its kind
    int64_t source_stride = 0;   // elements from the gradient of one source to that of the next
    TensorView squares;          // of main_grad, expert parameters: kernels/ops/squares.h; f64
    TensorView plain;            // working copy in the activation dtype; may be the master itself
    size_t plain_chunk = 0;      // of memory, that it is in: of a shard, those of a kind lie together
    ScaledTensor fprop, dgrad;

    // As GEMM operands [E, N, K] of the grouped GEMM.
    ScaledTensor for_fprop() const { return fprop ? fprop : ScaledTensor{.data = plain}; }
    // [E, N, K] that tokens of one source rank add to; main_grad is that of source 0, and in the end the
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
          arena_(ops.device(), "parameters"),
          sums_(ops.device(), "sums over sources") {}

    // Allocates all but the main gradient, initialises from Philox(seed, hash(name), global element index),
    // writes the working copies. Masters::callers: allocates the copies alone and writes nothing.
    Parameter& add(const ParameterSpec& spec);
    // Once, after the last add; throws Error(usage) for a name of Freeze that no parameter has. Main
    // gradients, contiguous for the dense parameters and for the expert parameters, so that each kind is one
    // reduction over ranks. Starts are aligned to 256 bytes; the gap between two gradients is 0. Those of
    // experts once a source, all of source 0 first. The sums of squares of expert gradients likewise, without
    // gaps. Frozen parameters have none. Those with gradient_with_dx share a tensor that nobody reads.
    void allocate_gradients();
    // [N], dense f32, expert as StateDtypes says; absent where there are none.
    TensorView dense_gradients() const { return dense_gradients_; }
    TensorView expert_gradients() const { return expert_gradients_; }
    // [P] f64: of all expert parameters, as the weight gradients with Context::sums_squares left them.
    TensorView expert_squares() const { return expert_squares_; }
    // Of the parameters added first to last, last excluded.
    struct Gradients {
        TensorView dense, expert;  // [N]; absent where there are none
    };
    Gradients gradients_of(size_t first, size_t last) const;
    // Their sums over the ranks that have the same parameters. Where ranks share the state every rank gets
    // the sums of its slices alone, unless StateShards says otherwise. replica: as below.
    void reduce_gradients(Exchange& exchange, int64_t replica, size_t first, size_t last,
                          const Launch& launch = {});
    // Whether a rank has only the sums of its own slices, of dense or of expert gradients; and which blocks
    // of all gradients belong to which rank.
    bool divides_gradients(bool expert) const;
    Shares gradient_shares(bool expert) const { return gradient_shares(0, parameters_.size(), expert); }
    // By all ranks together: the whole sums again.
    void gather_gradients(Exchange& exchange);
    // The sum over all ranks that hold these experts, in `gradient`, a part of expert_gradients(). With
    // several sources: over all source ranks of the job in ascending order, as where every rank holds all
    // experts. replica: this rank's, of its experts.
    void reduce_expert_gradients(Exchange& exchange, int64_t replica, const TensorView& gradient,
                                 const Launch& launch = {});
    std::deque<Parameter>& all() { return parameters_; }
    const std::deque<Parameter>& all() const { return parameters_; }
    // Writes the working copies of one parameter from its master, which is not sharded.
    void write_copies(Parameter& parameter);
    // The same from a master elsewhere, f32 or bf16 of the parameter's shape, which is not kept.
    void write_copies(const Parameter& parameter, const TensorView& master, const Launch& launch);
    // The same of all parameters, by all ranks together: shards of a master are gathered.
    void write_all_copies(Exchange& exchange);
    // Each rank has updated its slices. Makes the working copies of the sharded trained ones among those
    // added first to last, last excluded; called by all ranks that share their state. BF16 copies are
    // gathered directly, contiguous ones in one call. FP8 copies are rebuilt from the gathered masters, as
    // many per call as the buffer holds, because a scale may span slices and the second orientation crosses
    // them.
    void gather_copies(Exchange& exchange, size_t first, size_t last, const Launch& launch = {});
    // The whole FP32 master of a sharded parameter, in `whole`, f32 of its size.
    void gather_master(Exchange& exchange, const Parameter& parameter, const TensorView& whole,
                       const Launch& launch = {});
    // Bytes by category: master, moments, main_grad, copies, gathered master.
    std::map<std::string, int64_t> bytes() const;

private:
    void check_frozen() const;
    void allocate_whole(Parameter& parameter);
    void allocate_shard(Parameter& parameter);
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
    // This rank's slice of a sharded master, at its place in `whole`.
    void place_slice(const Parameter& parameter, const TensorView& whole, const Launch& launch);
    Shares gradient_shares(size_t first, size_t last, bool expert) const;
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
    TensorView gathered_;  // [N] f32: masters of parameters with FP8 copies, while they are made
};

}  // namespace fp8flow
